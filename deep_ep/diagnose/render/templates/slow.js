"use strict";

// Heatmap and timeline of a report. Words and tables are in the page already and need no script.
// html.py describes the data that is read here from the element #data.
(() => {
  // Lightness runs one way, away from the paper: large values stand out, also without colour.
  const RAMPS = {
    light: [[253, 247, 230], [252, 205, 130], [240, 130, 62], [194, 50, 58], [107, 15, 60], [38, 8, 34]],
    dark: [[27, 30, 38], [72, 36, 76], [142, 44, 80], [212, 86, 62], [246, 164, 76], [255, 240, 185]],
  };
  const PARTS = ["wait", "late", "issue", "path", "tokens"];
  const [LEFT, TOP] = [58, 42];
  const LARGEST_CELL = 64;
  const CELL_WITH_NUMBER = 38;
  const WIDEST_FIT = 640;
  const WIDEST_CANVAS = 4096;
  const LEGEND_WIDTH = 420;
  const LINE = { side: 76, top: 24, row: 18 };

  const byId = (id) => document.getElementById(id);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
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
    cell: null, // [row, column]
    marks: [],
    moment: null, // [operation, rank]
  };
  // What the two pictures show now; null while there is nothing to show.
  let shown = null;
  let turns = 0;

  // ------------------------------------------------------------------------------ data

  let unpacked = new Map();

  // float32 values as four planes of bytes, deflated, base64: see _packed() in html.py.
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

  async function unpackAll(packed, names) {
    const values = await Promise.all(names.map((name) => unpack(packed[name])));
    return Object.fromEntries(names.map((name, i) => [name, values[i]]));
  }

  async function load() {
    const window = data.windows[state.window];
    const measured = window.operations[state.operation];
    if (!measured) return null;
    const { matrices, timeline } = measured;
    return {
      window,
      measured,
      labels: window.labels,
      count: window.labels.length,
      matrices: matrices && (await unpackAll(matrices, PARTS)),
      recent: timeline && { ...timeline, ...(await unpackAll(timeline, ["entered", "arrival"])) },
    };
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
      ...lines.map((textContent, index) =>
        Object.assign(document.createElement("div"), { textContent, className: index === 1 ? "value" : "" }),
      ),
    );
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const beside = (at, size, room) => Math.max(4, at + 18 + size < room ? at + 18 : at - 18 - size);
    tip.style.left = `${beside(x, width, innerWidth)}px`;
    tip.style.top = `${beside(y, height, innerHeight)}px`;
  }

  // ---------------------------------------------------------------------------- colour

  const ramp = () => RAMPS[darkness.matches ? "dark" : "light"];
  const rgb = (colour) => `rgb(${colour.join(" ")})`;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function colour(level) {
    const stops = ramp();
    const position = clamp(level, 0, 1) * (stops.length - 1);
    const low = Math.min(Math.floor(position), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (position - low)));
  }

  // From values to 0..1 and back. Logarithmic above the everyday value, linear below: noise stays calm
  // beside what stands out.
  function scale() {
    const [calm, top] = shown.measured.scale[state.part === "tokens" ? "tokens" : "us"];
    if (state.scale === "linear") return { level: (value) => value / top, value: (level) => level * top };
    const whole = Math.log1p(top / calm);
    return {
      level: (value) => Math.log1p(Math.max(value, 0) / calm) / whole,
      value: (level) => calm * Math.expm1(level * whole),
    };
  }

  // ---------------------------------------------------------------------------- canvas

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

  function write(context, text, x, y, align, fill = css("--ink")) {
    context.fillStyle = fill;
    context.textAlign = align;
    context.fillText(text, x, y);
  }

  function strokeLines(context, lines, stroke, width) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.beginPath();
    for (const [x, y, toX, toY] of lines) {
      context.moveTo(x, y);
      context.lineTo(toX, toY);
    }
    context.stroke();
  }

  function circle(context, x, y, radius) {
    context.beginPath();
    context.arc(x, y, radius, 0, 7);
  }

  function dot(context, x, y, radius, fill) {
    context.fillStyle = fill;
    circle(context, x, y, radius);
    context.fill();
  }

  // --------------------------------------------------------------------------- heatmap

  function cellSize(count) {
    const room = Math.min(WIDEST_FIT, heat.parentElement.clientWidth - LEFT - 4);
    const fit = clamp(Math.floor(room / count), 1, LARGEST_CELL);
    const largest = Math.max(1, Math.floor((WIDEST_CANVAS - LEFT) / count));
    return Math.min(fit * 2 ** state.zoom, largest);
  }

  function drawHeat() {
    byId("heat-box").hidden = byId("legend").hidden = !shown.matrices;
    if (!shown.matrices) {
      byId("heat-caption").textContent = `${state.operation}: the matrices of this window were not stored.`;
      return;
    }
    const { count } = shown;
    const size = cellSize(count);
    const extent = count * size;
    const values = shown.matrices[state.part];
    const context = prepare(heat, LEFT + extent + 2, TOP + extent + 2);
    drawStripes(context, extent);
    drawCells(context, values, extent);
    if (size >= CELL_WITH_NUMBER) drawNumbers(context, values, size);
    drawAxes(context, size);
    for (const mark of state.marks) outline(context, size, mark, css("--accent"), 3);
    if (state.cell) {
      const [row, column] = state.cell;
      outline(context, size, [row, column, row + 1, column + 1], css("--ink"), 2);
    }
    Object.assign(heat.dataset, { left: LEFT, top: TOP, cell: size, count });
    const unit = state.part === "tokens" ? "tokens" : "microseconds";
    const caption = [
      `${state.operation}: ${state.part}, ${unit} ${shown.measured.per}, ${shown.measured.about}.`,
      "Rows wait, columns are waited for.",
      ...(values.every(Number.isFinite) ? [] : ["Striped: not known."]),
      ...(bordersFit(size) ? ["Lines part the nodes."] : []),
      ...shown.window.notes,
      ...shown.measured.notes,
    ].join(" ");
    byId("heat-caption").textContent = caption;
    heat.setAttribute("aria-label", `Heatmap, ${caption} Arrow keys read cells.`);
  }

  // Where a value is known, its cell covers them.
  function drawStripes(context, extent) {
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, extent, extent);
    context.clip();
    context.fillStyle = css("--panel");
    context.fill();
    const lines = [];
    for (let x = LEFT - extent; x < LEFT + extent; x += 6) lines.push([x, TOP + extent, x + extent, TOP]);
    strokeLines(context, lines, css("--soft"), 1);
    context.restore();
  }

  function drawCells(context, values, extent) {
    const { count } = shown;
    const { level } = scale();
    const image = new ImageData(count, count);
    const pixels = new DataView(image.data.buffer);
    const table = Array.from({ length: 512 }, (_, i) => {
      const [red, green, blue] = colour(i / 511);
      return ((red << 24) | (green << 16) | (blue << 8) | 255) >>> 0;
    });
    for (let i = 0; i < values.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      pixels.setUint32(4 * i, table[Math.round(clamp(level(values[i]), 0, 1) * 511)]);
    }
    const picture = document.createElement("canvas");
    picture.width = picture.height = count;
    picture.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, LEFT, TOP, extent, extent);
  }

  function outline(context, size, [row, column, rowEnd, columnEnd], stroke, width) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    const [x, y] = [LEFT + column * size - 0.5, TOP + row * size - 0.5];
    context.strokeRect(x, y, (columnEnd - column) * size + 1, (rowEnd - row) * size + 1);
  }

  function drawNumbers(context, values, size) {
    const { level } = scale();
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      const [red, green, blue] = colour(level(value));
      const fill = 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#000" : "#fff";
      const [row, column] = [Math.floor(i / shown.count), i % shown.count];
      write(context, short(value), LEFT + (column + 0.5) * size, TOP + (row + 0.5) * size, "center", fill);
    });
  }

  // Lines closer than this would hide what they part.
  function bordersFit(size) {
    const { borders } = shown.window;
    return borders.length > 0 && (size * shown.count) / (borders.length + 1) >= 24;
  }

  function drawAxes(context, size) {
    const extent = shown.count * size;
    write(context, "waited for: rank", LEFT, 10, "left", css("--soft"));
    context.save();
    context.translate(10, TOP);
    context.rotate(-Math.PI / 2);
    write(context, "waiting: rank", 0, 0, "right", css("--soft"));
    context.restore();
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((n) => n * size >= 26) || 512;
    for (let i = 0; i < shown.count; i += step) {
      write(context, i, LEFT + (i + 0.5) * size, TOP - 11, "center");
      write(context, i, LEFT - 6, TOP + (i + 0.5) * size, "right");
    }
    if (!bordersFit(size)) return;
    const borders = shown.window.borders.flatMap((border) => [
      [LEFT + border * size, TOP, LEFT + border * size, TOP + extent],
      [LEFT, TOP + border * size, LEFT + extent, TOP + border * size],
    ]);
    strokeLines(context, borders, css("--ink"), size >= 4 ? 2 : 1);
  }

  function drawLegend() {
    const left = 18;
    const { value } = scale();
    const context = prepare(byId("legend"), LEGEND_WIDTH + 60, 34);
    const gradient = context.createLinearGradient(left, 0, left + LEGEND_WIDTH, 0);
    ramp().forEach((stop, i, stops) => gradient.addColorStop(i / (stops.length - 1), rgb(stop)));
    context.fillStyle = gradient;
    context.fillRect(left, 0, LEGEND_WIDTH, 14);
    for (const level of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
      const unit = level === 1 && state.part !== "tokens" ? " us" : "";
      write(context, short(value(level)) + unit, left + level * LEGEND_WIDTH, 25, "center");
    }
  }

  function cellUnder(event) {
    if (!shown.matrices) return null;
    const box = heat.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / heat.dataset.cell);
    const row = Math.floor((event.clientY - box.top - TOP) / heat.dataset.cell);
    return Math.min(row, column) >= 0 && Math.max(row, column) < shown.count ? [row, column] : null;
  }

  function tellCell(x, y) {
    const [row, column] = state.cell;
    const { labels, count } = shown;
    const { per } = shown.measured;
    const values = Object.fromEntries(PARTS.map((part) => [part, shown.matrices[part][row * count + column]]));
    const known = (part) => Number.isFinite(values[part]);
    const value = (part) => number(values[part]);
    const unit = !known(state.part) ? "" : state.part === "tokens" ? ` ${per}` : ` us ${per}`;
    const lines = [`${labels[row]} waits for ${labels[column]}`, `${state.part} ${value(state.part)}${unit}`];
    if (known("late")) {
      const parts = `late ${value("late")} + issue ${value("issue")} + path ${value("path")}`;
      lines.push(`wait ${value("wait")} = ${parts} us`);
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

  function moveCell({ key, shiftKey }) {
    const last = shown.count - 1;
    const step = shiftKey ? 8 : 1;
    const moves = {
      ArrowUp: [-step, 0],
      ArrowDown: [step, 0],
      ArrowLeft: [0, -step],
      ArrowRight: [0, step],
      Home: [0, -last],
      End: [0, last],
    };
    if (key === "+" || key === "-") {
      zoom(key === "+" ? 1 : -1);
    } else if (key in moves) {
      const moved = state.cell?.map((place, axis) => clamp(place + moves[key][axis], 0, last));
      state.cell = moved ?? [0, 0];
    } else {
      return false;
    }
    return true;
  }

  function zoom(step) {
    state.zoom = clamp(state.zoom + step, 0, 6);
    if (shown) drawHeat();
  }

  // -------------------------------------------------------------------------- timeline

  const stampsOf = (row, rank) => {
    const at = row * shown.count + rank;
    return { entered: shown.recent.entered[at], arrival: shown.recent.arrival[at] };
  };
  const middleOf = (row) => LINE.top + (row + 0.5) * LINE.row;

  // Left of zero: entered before the observer began to wait. The waiting gets at least half the width.
  function timelineRange() {
    const { recent } = shown;
    const ends = Float64Array.from(recent.last, (rank, row) => stampsOf(row, rank).arrival);
    const known = ends.filter(Number.isFinite).sort();
    const end = 1.1 * Math.max(1, known[Math.floor(0.9 * (known.length - 1))] || 1);
    const first = recent.entered.reduce((least, us) => (us < least ? us : least), 0);
    return [Math.max(first, -end), end];
  }

  function drawTimeline() {
    const { recent, count } = shown;
    byId("line-box").hidden = !recent;
    const caption = recent
      ? `${state.operation}: recent operations as ${shown.labels[recent.observer]} saw them; ` +
        "zero is when it began to wait. Ticks: entered. Dots: data there. Large dot: came last. " +
        "At the right edge: beyond it."
      : "No recent operations were kept.";
    byId("line-caption").textContent = caption;
    if (!recent) return;
    const width = clamp(line.parentElement.clientWidth - 4, 320, 1000);
    const height = LINE.top + recent.ops.length * LINE.row;
    const context = prepare(line, width, height);
    const [begin, end] = timelineRange();
    recent.x = (us) => LINE.side + ((clamp(us, begin, end) - begin) / (end - begin)) * (width - 2 * LINE.side);
    drawTimeAxis(context, begin, end, height);
    recent.ops.forEach((operation, row) => {
      const y = middleOf(row);
      write(context, operation, LINE.side - 8, y, "right", css("--soft"));
      context.globalAlpha = count > 64 ? 0.35 : 0.8;
      for (let rank = 0; rank < count; rank++) {
        const { entered, arrival } = stampsOf(row, rank);
        context.fillStyle = css("--soft");
        if (Number.isFinite(entered)) context.fillRect(recent.x(entered), y - 5, 1, 10);
        if (Number.isFinite(arrival)) dot(context, recent.x(arrival), y, 2.2, css("--accent"));
      }
      context.globalAlpha = 1;
      drawLast(context, row, y);
    });
    if (state.moment) {
      const [row, rank] = state.moment;
      context.strokeStyle = css("--ink");
      context.lineWidth = 1.5;
      circle(context, recent.x(stampsOf(row, rank).arrival), middleOf(row), 7);
      context.stroke();
    }
    Object.assign(line.dataset, { top: LINE.top, row: LINE.row });
    line.setAttribute("aria-label", `Timeline, ${caption} Arrow keys read it.`);
  }

  function drawLast(context, row, y) {
    const { last, x } = shown.recent;
    const { entered, arrival } = stampsOf(row, last[row]);
    if (!Number.isFinite(arrival)) return;
    if (Number.isFinite(entered)) {
      strokeLines(context, [[x(entered), y, x(arrival), y]], css("--bad"), 1.5);
      context.fillStyle = css("--bad");
      context.fillRect(x(entered) - 1, y - 5, 2, 10);
    }
    dot(context, x(arrival), y, 4.2, css("--bad"));
    write(context, `rank ${last[row]}`, x(arrival) + 8, y, "left", css("--bad"));
  }

  function drawTimeAxis(context, begin, end, height) {
    const { x } = shown.recent;
    const steps = [1, 2, 5].map((n) => n * 10 ** Math.floor(Math.log10((end - begin) / 8)));
    const step = steps.find((n) => n >= (end - begin) / 10) || steps[2];
    for (let us = Math.ceil(begin / step) * step; us <= end; us += step) {
      context.fillStyle = css("--line");
      context.fillRect(x(us), 20, us === 0 ? 2 : 1, height);
      const side = us < 0 ? " before" : us > 0 ? "" : " us";
      write(context, short(Math.abs(us)).replace(".0", "") + side, x(us), 9, "center", css("--soft"));
    }
  }

  function tellMoment(clientX, clientY) {
    const { recent, labels } = shown;
    const [row, rank] = state.moment;
    const { entered, arrival } = stampsOf(row, rank);
    const when = (us) =>
      Number.isFinite(us)
        ? `${number(Math.abs(us))} us ${us < 0 ? "before" : "after"} the wait began`
        : "at a time not known";
    const box = line.getBoundingClientRect();
    showTip(
      [
        `${state.operation} ${recent.ops[row]}: ${labels[rank]}${rank === recent.last[row] ? " came last" : ""}`,
        `data there ${when(arrival)}`,
        `entered ${when(entered)}`,
        `operation began ${number(recent.begin[row])} us after the first one here`,
      ],
      clientX ?? box.left + recent.x(arrival),
      clientY ?? box.top + middleOf(row),
    );
  }

  function momentUnder(event) {
    const { recent, count } = shown;
    const box = line.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - LINE.top) / LINE.row);
    if (row < 0 || row >= recent.ops.length) return null;
    const at = event.clientX - box.left;
    // Of marks at the same place the last arrival is meant.
    let [best, distance] = [recent.last[row], Infinity];
    for (const rank of [best, ...Array(count).keys()]) {
      for (const us of Object.values(stampsOf(row, rank))) {
        const away = Math.abs(recent.x(us) - at);
        if (away < distance - 0.5) [best, distance] = [rank, away];
      }
    }
    return [row, best];
  }

  function moveMoment({ key }) {
    const { recent, count } = shown;
    const [row, rank] = state.moment || [0, recent.last[0]];
    const turn = { ArrowUp: -1, ArrowDown: 1 }[key];
    const shift = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (turn) {
      const next = state.moment ? clamp(row + turn, 0, recent.ops.length - 1) : 0;
      state.moment = [next, recent.last[next]];
    } else if (shift) {
      const arrival = (one) => stampsOf(row, one).arrival;
      const ordered = [...Array(count).keys()]
        .filter((one) => Number.isFinite(arrival(one)))
        .sort((a, b) => arrival(a) - arrival(b));
      const place = clamp(ordered.indexOf(rank) + shift, 0, ordered.length - 1);
      state.moment = [row, ordered[place] ?? rank];
    } else {
      return false;
    }
    return true;
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
      ...names.map((value) => {
        const label = document.createElement("label");
        const input = document.createElement("input");
        Object.assign(input, { type: "radio", name: "operation", value, checked: value === state.operation });
        label.append(input, ` ${value}`);
        return label;
      }),
    );
    forget();
  }

  function pointAtNothing() {
    state.cell = state.moment = null;
    tip.hidden = true;
  }

  function forget() {
    pointAtNothing();
    state.marks = [];
  }

  function check(name) {
    for (const input of document.getElementsByName(name)) input.checked = input.value === state[name];
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
    const { operation, part, marks } = target.dataset;
    Object.assign(state, { operation, part, marks: JSON.parse(marks) });
    check("operation");
    check("part");
    refresh().then(() => byId("heat-box").scrollIntoView({ block: "nearest" }));
  });

  // A picture whose marks can be pointed at and read by keys; `pointed` is where state keeps the one.
  function listen(canvas, { pointed, isThere, under, move, draw, tell }) {
    const say = (x, y) => (state[pointed] ? tell(x, y) : (tip.hidden = true));
    canvas.addEventListener("mousemove", (event) => {
      if (!isThere()) return;
      state[pointed] = under(event);
      say(event.clientX, event.clientY);
    });
    canvas.addEventListener("keydown", (event) => {
      if (!isThere()) return;
      if (event.key === "Escape") state[pointed] = null;
      else if (!move(event)) return;
      event.preventDefault();
      draw();
      say();
    });
    canvas.addEventListener("mouseleave", pointAtNothing);
    canvas.addEventListener("blur", () => (tip.hidden = true));
  }

  listen(heat, {
    pointed: "cell",
    isThere: () => shown?.matrices,
    under: cellUnder,
    move: moveCell,
    draw: drawHeat,
    tell: tellCell,
  });
  listen(line, {
    pointed: "moment",
    isThere: () => shown?.recent,
    under: momentUnder,
    move: moveMoment,
    draw: drawTimeline,
    tell: tellMoment,
  });
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
