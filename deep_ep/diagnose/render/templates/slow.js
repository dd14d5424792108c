"use strict";

// The heatmap of a report. All else is in the page already and needs no script.
// html.py describes the data that is read here from the element #data.
(() => {
  // Lightness runs one way: large values stand out, also without colour.
  const RAMP = [[253, 247, 230], [252, 205, 130], [240, 130, 62], [194, 50, 58], [107, 15, 60], [38, 8, 34]];
  const PARTS = ["wait", "late", "issue", "path", "tokens"];
  // Room for the numbers of ranks; page.css leaves it, too.
  const [LEFT, TOP] = [58, 42];
  const WIDEST_FIT = 640;
  const [SMALLEST_CELL, CELL_WITH_NUMBER, LARGEST_CELL] = [3, 38, 64];

  const byId = (id) => document.getElementById(id);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const data = JSON.parse(byId("data").textContent);
  const heat = byId("heat");
  const tip = byId("tip");
  const state = {
    window: data.windows.length - 1,
    operation: null,
    part: "wait",
    cell: null, // [row, column]
    marks: [], // [row, column, rows, columns]
  };
  // What the picture shows now; null while there is nothing to show.
  let shown = null;
  let turns = 0;

  // float32 values, deflated, base64: see _packed() in html.py.
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Float32Array(await new Response(stream).arrayBuffer());
  }

  async function load() {
    const window = data.windows[state.window];
    const measured = window.operations[state.operation];
    if (!measured) return null;
    const matrices = {};
    for (const part of measured.matrices ? PARTS : []) matrices[part] = await unpack(measured.matrices[part]);
    const count = window.labels.length;
    const size = clamp(Math.floor(WIDEST_FIT / count), SMALLEST_CELL, LARGEST_CELL);
    return { ...window, ...measured, matrices: measured.matrices && matrices, count, size };
  }

  function number(value) {
    if (!Number.isFinite(value)) return "not known";
    const digits = Math.abs(value) >= 1000 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    return value.toLocaleString("en-US", { maximumFractionDigits: digits });
  }

  function short(value) {
    if (value < 9999.5) return value.toFixed(value === 0 || value >= 9.95 ? 0 : 1);
    return value < 999950 ? `${(value / 1e3).toFixed(0)}k` : `${(value / 1e6).toFixed(1)}M`;
  }

  function colour(level) {
    const position = clamp(level, 0, 1) * (RAMP.length - 1);
    const low = Math.min(Math.floor(position), RAMP.length - 2);
    return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (position - low)));
  }

  const ink = ([red, green, blue]) => (0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#000" : "#fff");

  // From values to 0..1 and back. Logarithmic above the everyday value, linear below: noise stays calm
  // beside what stands out.
  function scale() {
    const [calm, top] = shown.scale[state.part === "tokens" ? "tokens" : "us"];
    const whole = Math.log1p(top / calm);
    return {
      level: (value) => Math.log1p(Math.max(value, 0) / calm) / whole,
      value: (level) => calm * Math.expm1(level * whole),
    };
  }

  function draw() {
    const { count, size, matrices, per } = shown;
    heat.hidden = byId("legend").hidden = !matrices;
    const unit = state.part === "tokens" ? "tokens" : "microseconds";
    const caption = matrices
      ? [
          `${state.operation}: ${state.part}, ${unit} ${per}, ${shown.about}. Rows wait, columns are waited for.`,
          ...(matrices[state.part].every(Number.isFinite) ? [] : ["Striped: not known."]),
          ...(shown.rounded ? ["Values are rounded to 0.2 %."] : []),
        ].join(" ")
      : `${state.operation}: the matrices of this window were not stored.`;
    byId("heat-caption").textContent = caption;
    if (!matrices) return;
    heat.setAttribute("aria-label", `Heatmap, ${caption} Arrow keys read cells.`);
    Object.assign(heat.dataset, { left: LEFT, top: TOP, cell: size });
    drawLegend();
    drawCells();
    drawOver();
  }

  function drawLegend() {
    const values = [0, 0.2, 0.4, 0.6, 0.8, 1].map((level) => {
      const box = document.createElement("span");
      box.textContent = short(scale().value(level));
      Object.assign(box.style, { background: `rgb(${colour(level)})`, color: ink(colour(level)) });
      return box;
    });
    byId("legend").replaceChildren(...values, state.part === "tokens" ? "" : " us");
  }

  // A pixel for each cell, which the browser enlarges; what is not known shows the stripes behind.
  function drawCells() {
    const { count, size, matrices } = shown;
    const { level } = scale();
    const image = new ImageData(count, count);
    matrices[state.part].forEach((value, i) => {
      if (Number.isFinite(value)) image.data.set([...colour(level(value)), 255], 4 * i);
    });
    const cells = byId("cells");
    cells.width = cells.height = count;
    cells.style.width = cells.style.height = `${count * size}px`;
    cells.getContext("2d").putImageData(image, 0, 0);
  }

  // Numbers, lines and marks, of nothing but numbers.
  function drawOver() {
    const { count, size, matrices, borders } = shown;
    const whole = count * size;
    const [x, y] = [(column) => LEFT + column * size, (row) => TOP + row * size];
    const text = (words, left, top, anchor, fill = "") =>
      `<text x="${left}" y="${top + 4}" text-anchor="${anchor}" ${fill && `fill="${fill}"`}>${words}</text>`;
    const box = (name, [row, column, rows, columns]) =>
      `<rect class="${name}" x="${x(column)}" y="${y(row)}" width="${columns * size}" height="${rows * size}"/>`;
    const drawn = [text("waited for: rank", LEFT, 8, "start")];
    drawn.push(`<g transform="rotate(-90)">${text("waiting: rank", -TOP, 8, "end")}</g>`);
    const step = [1, 2, 4, 8, 16, 32].find((n) => n * size >= 26);
    for (let i = 0; i < count; i += step) {
      drawn.push(text(i, x(i + 0.5), TOP - 11, "middle"), text(i, LEFT - 6, y(i + 0.5), "end"));
    }
    if (size >= CELL_WITH_NUMBER) {
      const { level } = scale();
      matrices[state.part].forEach((value, i) => {
        const [left, top] = [x((i % count) + 0.5), y(Math.floor(i / count) + 0.5)];
        if (Number.isFinite(value)) drawn.push(text(short(value), left, top, "middle", ink(colour(level(value)))));
      });
    }
    for (const i of borders) drawn.push(`<path class="border" d="M${x(i)} ${TOP}v${whole}M${LEFT} ${y(i)}h${whole}"/>`);
    drawn.push(...state.marks.map((mark) => box("mark", mark)));
    if (state.cell) drawn.push(box("cell", [...state.cell, 1, 1]));
    const over = byId("over");
    over.setAttribute("width", LEFT + whole + 2);
    over.setAttribute("height", TOP + whole + 2);
    over.innerHTML = drawn.join("");
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

  function tellCell(x, y) {
    const [row, column] = state.cell;
    const { labels, count, per, size } = shown;
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
    if ([row, column].some((rank) => shown.missing.includes(rank))) {
      lines.push("Missing: no counters came from there.");
    }
    const box = heat.getBoundingClientRect();
    showTip(lines, x ?? box.left + LEFT + (column + 0.5) * size, y ?? box.top + TOP + (row + 0.5) * size);
  }

  async function refresh() {
    document.body.dataset.ready = "";
    const turn = ++turns;
    const loaded = await load();
    // Something else may have been chosen while this was unpacked.
    if (turn !== turns) return;
    shown = loaded;
    byId("pictures").hidden = !shown;
    byId("no-pictures").hidden = Boolean(shown);
    if (shown) draw();
    document.body.dataset.ready = "yes";
  }

  function forget() {
    state.cell = null;
    state.marks = [];
    tip.hidden = true;
  }

  function chooseWindow(index) {
    state.window = index;
    for (const part of document.querySelectorAll("[data-window]")) {
      part.hidden = Number(part.dataset.window) !== index;
    }
    const names = Object.keys(data.windows[index].operations);
    if (!names.includes(state.operation)) state.operation = names[0] ?? null;
    const choices = names.map((value) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      Object.assign(input, { type: "radio", name: "operation", value, checked: value === state.operation });
      label.append(input, ` ${value}`);
      return label;
    });
    byId("operations").replaceChildren(byId("operations").firstElementChild, ...choices);
    forget();
  }

  document.addEventListener("change", ({ target }) => {
    if (target.id === "window") {
      chooseWindow(Number(target.value));
    } else {
      state[target.name] = target.value;
      if (target.name === "operation") forget();
    }
    refresh();
  });

  document.addEventListener("click", ({ target }) => {
    const { operation, part, marks } = target.dataset;
    if (!marks) return;
    forget();
    Object.assign(state, { operation, part, marks: JSON.parse(marks) });
    for (const name of ["operation", "part"]) {
      for (const input of document.getElementsByName(name)) input.checked = input.value === state[name];
    }
    refresh().then(() => byId("heat-box").scrollIntoView({ block: "nearest" }));
  });

  heat.addEventListener("mousemove", ({ clientX, clientY }) => {
    const { left, top } = heat.getBoundingClientRect();
    const column = Math.floor((clientX - left - LEFT) / shown.size);
    const row = Math.floor((clientY - top - TOP) / shown.size);
    const isCell = Math.min(row, column) >= 0 && Math.max(row, column) < shown.count;
    state.cell = isCell ? [row, column] : null;
    if (isCell) tellCell(clientX, clientY);
    else tip.hidden = true;
  });

  heat.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (move) state.cell = state.cell?.map((place, axis) => clamp(place + move[axis], 0, shown.count - 1)) ?? [0, 0];
    else if (event.key === "Escape") state.cell = null;
    else return;
    event.preventDefault();
    drawOver();
    if (state.cell) tellCell();
    else tip.hidden = true;
  });

  for (const left of ["mouseleave", "blur"]) {
    heat.addEventListener(left, () => {
      state.cell = null;
      tip.hidden = true;
    });
  }

  if (typeof DecompressionStream === "undefined") {
    byId("no-pictures").textContent = "The heatmap needs a browser of 2023 or newer.";
    return;
  }
  chooseWindow(state.window);
  refresh();
})();
