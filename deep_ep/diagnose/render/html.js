"use strict";

// Heatmap and timeline of a report. Words and tables are in the page already and need no script.
// page.py describes the data that is read here from the element #data.
(() => {
  // Lightness runs one way, away from the paper: large values stand out, also without colour.
  const RAMPS = {
    light: [[253, 247, 230], [252, 205, 130], [240, 130, 62], [194, 50, 58], [107, 15, 60], [38, 8, 34]],
    dark: [[27, 30, 38], [72, 36, 76], [142, 44, 80], [212, 86, 62], [246, 164, 76], [255, 240, 185]],
  };
  const PARTS = ["wait", "late", "issue", "path", "tokens"];
  const LEFT = 58;
  const TOP = 42;
  const LARGEST_CELL = 64;
  const CELL_WITH_NUMBER = 38;
  const WIDEST_FIT = 640;
  const WIDEST_CANVAS = 4096;
  const TIMELINE_ROW = 18;

  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const heat = byId("heat");
  const line = byId("line");
  const tip = byId("tip");
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const state = {
    window: data.windows.length - 1,
    operation: null,
    part: "wait",
    scale: "log",
    zoom: 0,
    cell: null,
    marks: [],
    moment: null,
  };
  // What the two pictures show now; null while there is nothing to show.
  let shown = null;
  let turns = 0;

  // ------------------------------------------------------------------------------ data

  let unpacked = new Map();

  // float32 values as four planes of bytes, deflated, base64: see _packed() in page.py.
  async function unpack(text) {
    if (!unpacked.has(text)) {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      const planes = new Uint8Array(await new Response(stream).arrayBuffer());
      const count = planes.length / 4;
      const words = new Uint32Array(count);
      for (let plane = 0; plane < 4; plane++) {
        for (let i = 0; i < count; i++) words[i] |= planes[plane * count + i] << (8 * plane);
      }
      unpacked.set(text, new Float32Array(words.buffer));
    }
    return unpacked.get(text);
  }

  async function load() {
    const window = data.windows[state.window];
    const measured = window.operations[state.operation];
    if (!measured) return null;
    let matrices = null;
    if (measured.matrices) {
      matrices = {};
      for (const part of PARTS) matrices[part] = await unpack(measured.matrices[part]);
    }
    const recent = measured.timeline && {
      ...measured.timeline,
      entered: await unpack(measured.timeline.entered),
      arrival: await unpack(measured.timeline.arrival),
    };
    return { window, measured, matrices, recent, labels: window.labels };
  }

  // ----------------------------------------------------------------------------- words

  function number(value) {
    if (!Number.isFinite(value)) return "not known";
    const digits = Math.abs(value) >= 1000 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    return value.toLocaleString("en-US", { maximumFractionDigits: digits });
  }

  function short(value) {
    if (value === 0) return "0";
    if (value < 9999.5) return value.toFixed(value < 9.95 ? 1 : 0);
    if (value < 999950) return `${(value / 1e3).toFixed(value < 99950 ? 1 : 0)}k`;
    return `${(value / 1e6).toFixed(1)}M`;
  }

  function showTip(lines, x, y) {
    tip.replaceChildren(
      ...lines.map((text, index) => {
        const element = document.createElement("div");
        element.textContent = text;
        if (index === 1) element.className = "value";
        return element;
      }),
    );
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 18 + box.width < innerWidth ? x + 18 : x - 18 - box.width;
    const top = y + 18 + box.height < innerHeight ? y + 18 : y - 18 - box.height;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  // ---------------------------------------------------------------------------- colour

  function ramp() {
    return RAMPS[darkness.matches ? "dark" : "light"];
  }

  function colour(level) {
    const stops = ramp();
    const position = Math.min(Math.max(level, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(position), stops.length - 2);
    const part = position - low;
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * part));
  }

  // Logarithmic above the everyday value, linear below: noise stays calm beside what stands out.
  function level(value) {
    const [calm, top] = shown.measured.scale[state.part === "tokens" ? "tokens" : "us"];
    if (state.scale === "log") return Math.log1p(Math.max(value, 0) / calm) / Math.log1p(top / calm);
    return value / top;
  }

  function valueAt(part) {
    const [calm, top] = shown.measured.scale[state.part === "tokens" ? "tokens" : "us"];
    return state.scale === "log" ? calm * Math.expm1(part * Math.log1p(top / calm)) : part * top;
  }

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function prepare(canvas, width, height) {
    const ratio = Math.min(devicePixelRatio || 1, (2 * WIDEST_CANVAS) / Math.max(width, height));
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  // --------------------------------------------------------------------------- heatmap

  function cellSize(count) {
    const room = Math.min(WIDEST_FIT, heat.parentElement.clientWidth - LEFT - 4);
    const fit = Math.max(1, Math.min(LARGEST_CELL, Math.floor(room / count)));
    const largest = Math.max(1, Math.floor((WIDEST_CANVAS - LEFT) / count));
    return Math.min(fit * 2 ** state.zoom, largest);
  }

  function stripes(context) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = css("--panel");
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = css("--soft");
    pen.beginPath();
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift, 6);
      pen.lineTo(shift + 6, 0);
    }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  }

  function drawHeat() {
    byId("heat-box").hidden = byId("legend").hidden = !shown.matrices;
    if (!shown.matrices) {
      byId("heat-caption").textContent =
        `${state.operation}: the matrices of this window were not stored.`;
      return;
    }
    const count = shown.labels.length;
    const size = cellSize(count);
    const extent = count * size;
    const values = shown.matrices[state.part];
    const context = prepare(heat, LEFT + extent + 2, TOP + extent + 2);

    // A cell that is not known stays clear, so that the stripes below it are seen.
    const image = new ImageData(count, count);
    const pixels = new DataView(image.data.buffer);
    const table = Array.from({ length: 512 }, (_, i) => {
      const [red, green, blue] = colour(i / 511);
      return ((red << 24) | (green << 16) | (blue << 8) | 255) >>> 0;
    });
    for (let i = 0; i < values.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      const place = Math.round(Math.min(Math.max(level(values[i]), 0), 1) * 511);
      pixels.setUint32(4 * i, table[place]);
    }
    const picture = document.createElement("canvas");
    picture.width = picture.height = count;
    picture.getContext("2d").putImageData(image, 0, 0);
    context.fillStyle = stripes(context);
    context.fillRect(LEFT, TOP, extent, extent);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, LEFT, TOP, extent, extent);

    if (size >= CELL_WITH_NUMBER) drawNumbers(context, values, count, size);
    drawAxes(context, count, size);
    context.strokeStyle = css("--accent");
    context.lineWidth = 3;
    for (const mark of state.marks) outline(context, size, ...mark);
    if (state.cell) {
      const [row, column] = state.cell;
      context.strokeStyle = css("--ink");
      context.lineWidth = 2;
      outline(context, size, row, column, row + 1, column + 1);
    }
    Object.assign(heat.dataset, { left: LEFT, top: TOP, cell: size, count });
    const unit = state.part === "tokens" ? "tokens" : "microseconds";
    byId("heat-caption").textContent = [
      `${state.operation}: ${state.part}, ${unit} ${shown.measured.per}, ${shown.measured.about}.`,
      "Rows wait, columns are waited for.",
      ...(values.every(Number.isFinite) ? [] : ["Striped: not known."]),
      ...(bordersFit(size) ? ["Lines part the nodes."] : []),
      ...shown.window.notes,
      ...shown.measured.notes,
    ].join(" ");
    const caption = byId("heat-caption").textContent;
    heat.setAttribute("aria-label", `Heatmap, ${caption} Arrow keys read cells.`);
  }

  function outline(context, size, row, column, rowEnd, columnEnd) {
    const [width, height] = [(columnEnd - column) * size, (rowEnd - row) * size];
    context.strokeRect(LEFT + column * size - 0.5, TOP + row * size - 0.5, width + 1, height + 1);
  }

  function drawNumbers(context, values, count, size) {
    context.textAlign = "center";
    for (let i = 0; i < values.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      const [red, green, blue] = colour(level(values[i]));
      context.fillStyle = 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#000" : "#fff";
      const x = LEFT + ((i % count) + 0.5) * size;
      context.fillText(short(values[i]), x, TOP + (Math.floor(i / count) + 0.5) * size);
    }
  }

  // Lines closer than this would hide what they part.
  function bordersFit(size) {
    const { borders } = shown.window;
    return borders.length > 0 && (size * shown.labels.length) / (borders.length + 1) >= 24;
  }

  function drawAxes(context, count, size) {
    context.fillStyle = css("--soft");
    context.textAlign = "left";
    context.fillText("waited for: rank", LEFT, 10);
    context.save();
    context.translate(10, TOP);
    context.rotate(-Math.PI / 2);
    context.textAlign = "right";
    context.fillText("waiting: rank", 0, 0);
    context.restore();
    context.fillStyle = css("--ink");
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((n) => n * size >= 26) || 512;
    for (let i = 0; i < count; i += step) {
      const middle = (i + 0.5) * size;
      context.textAlign = "center";
      context.fillText(i, LEFT + middle, TOP - 11);
      context.textAlign = "right";
      context.fillText(i, LEFT - 6, TOP + middle);
    }
    if (!bordersFit(size)) return;
    context.strokeStyle = css("--ink");
    context.lineWidth = size >= 4 ? 2 : 1;
    context.beginPath();
    for (const border of shown.window.borders) {
      context.moveTo(LEFT + border * size, TOP);
      context.lineTo(LEFT + border * size, TOP + count * size);
      context.moveTo(LEFT, TOP + border * size);
      context.lineTo(LEFT + count * size, TOP + border * size);
    }
    context.stroke();
  }

  function drawLegend() {
    const width = 420;
    const context = prepare(byId("legend"), width + 60, 34);
    for (let x = 0; x < width; x++) {
      context.fillStyle = `rgb(${colour(x / width).join(" ")})`;
      context.fillRect(LEFT + x - 40, 0, 1.5, 14);
    }
    context.fillStyle = css("--ink");
    context.textAlign = "center";
    for (const part of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
      const unit = part === 1 && state.part !== "tokens" ? " us" : "";
      context.fillText(short(valueAt(part)) + unit, LEFT - 40 + part * width, 25);
    }
  }

  function cellUnder(event) {
    const { left, top, cell, count } = heat.dataset;
    const box = heat.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - left) / cell);
    const row = Math.floor((event.clientY - box.top - top) / cell);
    return Math.min(row, column) >= 0 && Math.max(row, column) < count ? [row, column] : null;
  }

  function tellCell(x, y) {
    if (!shown || !shown.matrices || !state.cell) {
      tip.hidden = true;
      return;
    }
    const [row, column] = state.cell;
    const { labels } = shown;
    const known = (part) => Number.isFinite(shown.matrices[part][row * labels.length + column]);
    const value = (part) => number(shown.matrices[part][row * labels.length + column]);
    const { per } = shown.measured;
    const unit = !known(state.part) ? "" : state.part === "tokens" ? ` ${per}` : ` us ${per}`;
    const lines = [`${labels[row]} waits for ${labels[column]}`, `${state.part} ${value(state.part)}${unit}`];
    if (known("late")) {
      lines.push(
        `wait ${value("wait")} = late ${value("late")} + issue ${value("issue")} + path ${value("path")} us`,
      );
    } else if (known("wait")) {
      lines.push("what it consists of is not known");
    }
    if (known("tokens")) lines.push(`${value("tokens")} tokens ${per}`);
    if ([row, column].some((rank) => shown.window.missing.includes(rank))) {
      lines.push("Missing: no counters came from there.");
    }
    const box = heat.getBoundingClientRect();
    const size = Number(heat.dataset.cell);
    showTip(lines, x ?? box.left + LEFT + (column + 0.5) * size, y ?? box.top + TOP + (row + 0.5) * size);
  }

  function moveCell(event) {
    if (!shown || !shown.matrices) return;
    const last = shown.labels.length - 1;
    const [row, column] = state.cell || [0, 0];
    const step = event.shiftKey ? 8 : 1;
    const moves = {
      ArrowUp: [row - step, column],
      ArrowDown: [row + step, column],
      ArrowLeft: [row, column - step],
      ArrowRight: [row, column + step],
      Home: [row, 0],
      End: [row, last],
    };
    if (event.key === "Escape") {
      state.cell = null;
    } else if (event.key === "+" || event.key === "-") {
      zoom(event.key === "+" ? 1 : -1);
    } else if (event.key in moves) {
      const first = state.cell === null;
      state.cell = (first ? [0, 0] : moves[event.key]).map((i) => Math.min(Math.max(i, 0), last));
    } else {
      return;
    }
    event.preventDefault();
    drawHeat();
    tellCell();
  }

  function zoom(step) {
    state.zoom = Math.min(Math.max(state.zoom + step, 0), 6);
    if (shown) drawHeat();
  }

  // -------------------------------------------------------------------------- timeline

  // Left of zero: entered before the observer began to wait. The waiting gets at least half the width.
  function timelineRange() {
    const { recent, labels } = shown;
    const ends = Float64Array.from(recent.last, (rank, row) => recent.arrival[row * labels.length + rank]);
    const known = ends.filter(Number.isFinite).sort();
    const end = 1.1 * Math.max(1, known[Math.floor(0.9 * (known.length - 1))] || 1);
    const first = recent.entered.reduce((least, us) => (us < least ? us : least), 0);
    return [Math.max(first, -end), end];
  }

  function drawTimeline() {
    const { recent } = shown;
    byId("line-box").hidden = !recent;
    byId("line-caption").textContent = recent
      ? `${state.operation}: recent operations as ${shown.labels[recent.observer]} saw them; ` +
        "zero is when it began to wait. Ticks: entered. Dots: data there. Large dot: came last. " +
        "At the right edge: beyond it."
      : "No recent operations were kept.";
    if (!recent) return;
    const count = shown.labels.length;
    const width = Math.min(1000, Math.max(320, line.parentElement.clientWidth - 4));
    const height = 24 + recent.ops.length * TIMELINE_ROW;
    const context = prepare(line, width, height);
    const [begin, end] = timelineRange();
    const left = 76;
    const room = width - left - 76;
    const x = (us) => left + ((Math.min(Math.max(us, begin), end) - begin) / (end - begin)) * room;
    recent.x = x;
    drawTimeAxis(context, begin, end, x, height);
    for (let row = 0; row < recent.ops.length; row++) {
      const y = 24 + (row + 0.5) * TIMELINE_ROW;
      context.fillStyle = css("--soft");
      context.textAlign = "right";
      context.fillText(recent.ops[row], left - 8, y);
      context.globalAlpha = count > 64 ? 0.35 : 0.8;
      for (let rank = 0; rank < count; rank++) {
        const entered = recent.entered[row * count + rank];
        const arrival = recent.arrival[row * count + rank];
        context.fillStyle = css("--soft");
        if (Number.isFinite(entered)) context.fillRect(x(entered), y - 5, 1, 10);
        context.fillStyle = css("--accent");
        if (Number.isFinite(arrival)) dot(context, x(arrival), y, 2.2);
      }
      context.globalAlpha = 1;
      drawLast(context, row, y, x);
    }
    if (state.moment) {
      const [row, rank] = state.moment;
      context.strokeStyle = css("--ink");
      context.lineWidth = 1.5;
      context.beginPath();
      context.arc(x(recent.arrival[row * count + rank]), 24 + (row + 0.5) * TIMELINE_ROW, 7, 0, 7);
      context.stroke();
    }
    Object.assign(line.dataset, { top: 24, row: TIMELINE_ROW });
    line.setAttribute("aria-label", `Timeline, ${byId("line-caption").textContent} Arrow keys read it.`);
  }

  function dot(context, x, y, radius) {
    context.beginPath();
    context.arc(x, y, radius, 0, 7);
    context.fill();
  }

  function drawLast(context, row, y, x) {
    const { recent } = shown;
    const last = recent.last[row];
    const arrival = recent.arrival[row * shown.labels.length + last];
    const entered = recent.entered[row * shown.labels.length + last];
    if (!Number.isFinite(arrival)) return;
    context.fillStyle = context.strokeStyle = css("--bad");
    if (Number.isFinite(entered)) {
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(x(entered), y);
      context.lineTo(x(arrival), y);
      context.stroke();
      context.fillRect(x(entered) - 1, y - 5, 2, 10);
    }
    dot(context, x(arrival), y, 4.2);
    context.textAlign = "left";
    context.fillText(`rank ${last}`, x(arrival) + 8, y);
  }

  function drawTimeAxis(context, begin, end, x, height) {
    const step = [1, 2, 5].map((n) => n * 10 ** Math.floor(Math.log10((end - begin) / 8)));
    const chosen = step.find((n) => n >= (end - begin) / 10) || step[2];
    context.textAlign = "center";
    for (let us = Math.ceil(begin / chosen) * chosen; us <= end; us += chosen) {
      context.fillStyle = css("--line");
      context.fillRect(x(us), 20, us === 0 ? 2 : 1, height);
      context.fillStyle = css("--soft");
      context.fillText(`${short(Math.abs(us)).replace(".0", "")}${us < 0 ? " before" : us > 0 ? "" : " us"}`, x(us), 9);
    }
  }

  function tellMoment(clientX, clientY) {
    if (!shown || !shown.recent || !state.moment) {
      tip.hidden = true;
      return;
    }
    const { recent, labels } = shown;
    const [row, rank] = state.moment;
    const index = row * labels.length + rank;
    const [entered, arrival] = [recent.entered[index], recent.arrival[index]];
    const side = (us) => `${number(Math.abs(us))} us ${us < 0 ? "before" : "after"} the wait began`;
    const box = line.getBoundingClientRect();
    showTip(
      [
        `${state.operation} ${recent.ops[row]}: ${labels[rank]}${rank === recent.last[row] ? " came last" : ""}`,
        `data there ${Number.isFinite(arrival) ? side(arrival) : "at a time not known"}`,
        `entered ${Number.isFinite(entered) ? side(entered) : "at a time not known"}`,
        `operation began ${number(recent.begin[row])} us after the first one here`,
      ],
      clientX ?? box.left + recent.x(arrival),
      clientY ?? box.top + 24 + (row + 0.5) * TIMELINE_ROW,
    );
  }

  function momentUnder(event) {
    const box = line.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - 24) / TIMELINE_ROW);
    const { recent } = shown;
    if (row < 0 || row >= recent.ops.length) return null;
    const count = shown.labels.length;
    const at = event.clientX - box.left;
    // Of marks at the same place the last arrival is meant.
    let [best, distance] = [recent.last[row], Infinity];
    const ranks = [recent.last[row], ...Array(count).keys()];
    for (const rank of ranks) {
      for (const us of [recent.arrival[row * count + rank], recent.entered[row * count + rank]]) {
        const away = Math.abs(recent.x(us) - at);
        if (away < distance - 0.5) [best, distance] = [rank, away];
      }
    }
    return [row, best];
  }

  function moveMoment(event) {
    if (!shown || !shown.recent) return;
    const { recent } = shown;
    const count = shown.labels.length;
    const [row, rank] = state.moment || [0, recent.last[0]];
    const ordered = [...Array(count).keys()]
      .filter((one) => Number.isFinite(recent.arrival[row * count + one]))
      .sort((a, b) => recent.arrival[row * count + a] - recent.arrival[row * count + b]);
    const clamp = (i, length) => Math.min(Math.max(i, 0), length - 1);
    const turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const shift = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") {
      state.moment = null;
    } else if (turn) {
      const next = state.moment ? clamp(row + turn, recent.ops.length) : 0;
      state.moment = [next, recent.last[next]];
    } else if (shift) {
      state.moment = [row, ordered[clamp(ordered.indexOf(rank) + shift, ordered.length)] ?? rank];
    } else {
      return;
    }
    event.preventDefault();
    drawTimeline();
    tellMoment();
  }

  // -------------------------------------------------------------------------- controls

  async function refresh() {
    document.body.dataset.ready = "";
    const turn = ++turns;
    const loaded = await load();
    // Something else may have been chosen while this was unpacked.
    if (turn !== turns) return;
    shown = loaded;
    byId("pictures").hidden = !shown;
    byId("no-pictures").hidden = Boolean(shown);
    if (shown) {
      drawHeat();
      drawLegend();
      drawTimeline();
    }
    document.body.dataset.ready = `${state.window} ${state.operation} ${state.part} ${state.scale}`;
  }

  function chooseWindow(index) {
    state.window = index;
    unpacked = new Map();
    for (const part of document.querySelectorAll("[data-window]")) {
      part.hidden = Number(part.dataset.window) !== index;
    }
    const names = Object.keys(data.windows[index].operations);
    if (!names.includes(state.operation)) state.operation = names[0] ?? null;
    byId("operations").replaceChildren(
      Object.assign(document.createElement("legend"), { textContent: "Operation" }),
      ...names.map((name) => {
        const label = document.createElement("label");
        const input = document.createElement("input");
        Object.assign(input, { type: "radio", name: "operation", value: name });
        input.checked = name === state.operation;
        label.append(input, ` ${name}`);
        return label;
      }),
    );
    forget();
  }

  function forget() {
    state.cell = state.moment = null;
    state.marks = [];
    tip.hidden = true;
  }

  function check(name, value) {
    for (const input of document.getElementsByName(name)) input.checked = input.value === value;
  }

  document.addEventListener("change", ({ target }) => {
    if (target.id === "window") {
      chooseWindow(Number(target.value));
    } else if (["operation", "part", "scale"].includes(target.name)) {
      state[target.name] = target.value;
      if (target.name === "operation") forget();
    } else {
      return;
    }
    refresh();
  });

  document.addEventListener("click", ({ target }) => {
    if (target.id === "larger" || target.id === "smaller") zoom(target.id === "larger" ? 1 : -1);
    if (!target.dataset.marks) return;
    forget();
    state.operation = target.dataset.operation;
    state.part = target.dataset.part;
    state.marks = JSON.parse(target.dataset.marks);
    check("operation", state.operation);
    check("part", state.part);
    refresh().then(() => byId("heat-box").scrollIntoView({ block: "nearest" }));
  });

  heat.addEventListener("mousemove", (event) => {
    if (!shown) return;
    state.cell = cellUnder(event);
    tellCell(event.clientX, event.clientY);
  });
  line.addEventListener("mousemove", (event) => {
    if (!shown || !shown.recent) return;
    state.moment = momentUnder(event);
    tellMoment(event.clientX, event.clientY);
  });
  for (const canvas of [heat, line]) {
    canvas.addEventListener("mouseleave", () => {
      state.cell = state.moment = null;
      tip.hidden = true;
    });
    canvas.addEventListener("blur", () => (tip.hidden = true));
  }
  heat.addEventListener("keydown", moveCell);
  line.addEventListener("keydown", moveMoment);
  darkness.addEventListener("change", refresh);
  addEventListener("resize", refresh);

  if (typeof DecompressionStream === "undefined") {
    byId("no-pictures").textContent = "Heatmap and timeline need a browser of 2023 or newer.";
    return;
  }
  byId("controls").hidden = false;
  chooseWindow(state.window);
  refresh();
})();
