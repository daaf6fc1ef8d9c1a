// All heads as small pictures, one head's map, its strips, and the row of a held query. Text enters through textContent alone.

export default shown((parent) => new View(parent), parsed);

// ---- data -----------------------------------------------------------------------------------------------------------

async function parsed(bytes) {
  const buffer = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const at = (place, Type) => new Type(buffer, 4 + length + place[0], place[1]);
  head.colours.sequential = at(head.colours.sequential, Uint8Array);
  head.colours.diverging = at(head.colours.diverging, Uint8Array);
  for (const panel of head.panels) {
    panel.tiles = tilesOf(panel, at(panel.tiles, Uint8Array));
    panel.weights = weightsOf(panel, at(panel.weights, Uint16Array));
    panel.received = at(panel.received, Float32Array);
    panel.received_evenly = at(panel.received_evenly, Float32Array);
    panel.row = panel.row && at(panel.row, Float32Array).map((v) => (v < 0 ? NaN : v));
  }
  if (head.minus) head.panels.push(minus(...head.panels, head.colours.minus));
  head.panels.forEach((panel, i) => (panel.signed = i === 2));
  return head;
}

function tilesOf({ shape: [layers, heads, rows, columns], brightest }, packed) {
  const full = new Float32Array(layers * heads * rows * columns).fill(NaN);
  let from = 0;
  for (let tile = 0; tile < layers * heads; tile++)
    for (let r = 0; r < rows; r++)
      for (let c = 0; c <= r; c++) full[(tile * rows + r) * columns + c] = (packed[from++] / 255) * brightest;
  return full;
}

function weightsOf({ queries, keys, top }, packed) {
  const rows = queries.length - 1, columns = keys.length - 1, full = new Float32Array(rows * columns).fill(NaN);
  let from = 0;
  for (let r = 0; r < rows; r++)
    for (let c = 0; c < columns && keys[c] < queries[r + 1]; c++) full[r * columns + c] = (packed[from++] / 65535) * top;
  return full;
}

function minus(a, b, colour) {
  const less = (x, y) => x && y && x.map((v, i) => v - y[i]);
  const same = a.shape.every((n, i) => n === b.shape[i]);
  return {
    ...a, title: "A − B", tag: "A − B", colour, tiles: same ? less(a.tiles, b.tiles) : null, weights: less(a.weights, b.weights),
    entropy: less(a.entropy, b.entropy), keys_used: less(a.keys_used, b.keys_used), sink: less(a.sink, b.sink),
    received: less(a.received, b.received), received_evenly: a.received.map(() => 0), row: less(a.row, b.row),
  };
}

function largest(values) {
  let most = 0;
  for (const v of values) if (Math.abs(v) > most) most = Math.abs(v);
  return most;
}

const span = (edges, i) => (edges[i + 1] === edges[i] + 1 ? `${edges[i]}` : `${edges[i]}–${edges[i + 1] - 1}`);
const cellOf = (edges, token) => { // the cell of a token, null where the map does not show it
  const after = edges.findIndex((first) => first > token);
  return after < 1 ? null : after - 1;
};
const tall = () => window.innerHeight - 260; // what is left below the header and the controls
const MAP = 760, AROUND = 200; // most pixels of a map; its title and readout, its bars and the names of its keys
const signed = (v) => (v > 0 ? "+" : "") + number(v);

// ---- drawing --------------------------------------------------------------------------------------------------------

function coloured(values, rows, columns, low, high, colours, root) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const reach = high - low || 1;
  for (let i = 0; i < values.length; i++) {
    const v = values[i];
    if (Number.isNaN(v)) continue; // the future stays clear
    let share = Math.max(0, Math.min(1, (v - low) / reach));
    if (root) share = low < 0 ? 0.5 + 0.5 * Math.sign(share - 0.5) * Math.sqrt(Math.abs(2 * share - 1)) : Math.sqrt(share);
    const c = 3 * Math.round(255 * share);
    image.data[4 * i] = colours[c];
    image.data[4 * i + 1] = colours[c + 1];
    image.data[4 * i + 2] = colours[c + 2];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function stamped(context, picture, x, y, width, height) {
  const ratio = window.devicePixelRatio || 1;
  context.imageSmoothingEnabled = picture.width > width * ratio; // enlarged cells keep their edges
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, x, y, width, height);
}

// ---- the element ----------------------------------------------------------------------------------------------------

const TICKS = 62, TICK = 13, GUTTER = 14, STRIP = 40, SMALL = 22, NUMBERS = 190, NARROW = 600, WAIT = 240;

class View {
  constructor(parent) {
    this.root = made("div", "attention", parent);
    this.root.setAttribute("role", "group");
    this.heads = made("section", "heads", this.root);
    this.heads.setAttribute("aria-label", "All layers and heads");
    this.maps = made("section", "maps", this.root);
    this.maps.setAttribute("aria-label", "Attention map of the selected head");
    this.readout = made("p", "readout");
    this.readout.setAttribute("role", "status");
    this.held = made("section", "held", this.root);
    this.held.setAttribute("aria-label", "Attention of the query token");
    this.width = 0;
    this.watch = new ResizeObserver(() => {
      const width = Math.floor(this.root.clientWidth);
      if (this.data && Math.abs(width - this.width) > 1) this.draw();
    });
    this.watch.observe(this.root);
    this.pointing = new Pointing("attention", (index, other) => this.mark(index, other ?? index));
  }

  leave() {
    this.watch.disconnect();
    this.pointing.leave();
    clearTimeout(this.waiting);
  }

  show(data) {
    this.data = data;
    this.cursor = null;
    this.pointing.tell(null);
    clearTimeout(this.waiting);
    this.draw();
  }

  draw() {
    this.width = Math.floor(this.root.clientWidth);
    if (!this.width) return; // not laid out yet; the observer comes back
    const focus = this.root.getRootNode().activeElement, place = focus && focus.dataset ? focus.dataset.place : null;
    this.root.setAttribute("aria-label", this.data.said);
    const beside = Math.max(240, Math.floor(this.width * 0.36)); // the map, where the pictures stay large enough to see
    const together = this.data.panels.length === 1 && this.width > 680 && this.data.panels[0].shape[1] * SMALL < beside;
    this.root.classList.toggle("together", together);
    this.drawHeads(together ? beside : this.width);
    this.drawMaps(together ? this.width - this.heads.offsetWidth - 24 : this.width);
    this.drawHeld();
    this.say();
    if (place) this.root.querySelector(`[data-place="${place}"]`)?.focus({ preventScroll: true });
  }

  // ---- all heads

  drawHeads(width) {
    const { panels, colours, whole, root, own } = this.data, shown = panels.filter((p) => p.tiles);
    this.heads.replaceChildren();
    made("h2", "", this.heads, "All heads (click to enlarge)");
    const row = made("div", width < NARROW ? "panels narrow" : "panels", this.heads);
    const abreast = width < NARROW ? 1 : shown.length, each = Math.floor((width - 8 - GUTTER * (abreast - 1)) / abreast);
    const top = whole ? 1 : Math.max(...shown.filter((p) => !p.signed).map((p) => p.scale[0]));
    shown.forEach((panel, i) => {
      const [layers, heads, rows, columns] = panel.shape, box = made("div", "panel", row);
      if (panels.length > 1) made("h3", "", box, panel.title);
      const high = Math.max(SMALL, Math.floor((Math.min(620, tall()) - 60) / layers)); // all layers are seen at once where they can be
      const size = Math.max(12, Math.min(104, high, Math.floor((each - 22) / heads)));
      const limit = panel.signed ? largest(panel.tiles) || 1 : top;
      const grid = made("div", "grid", box), canvas = made("canvas", "", grid);
      box.style.width = `${Math.max(size * heads + 22, Math.min(each, 256), NUMBERS)}px`;
      grid.setAttribute("role", "group");
      grid.setAttribute("aria-label", `Heads of ${panel.title}; arrow keys move, Enter enlarges`);
      const context = sized(canvas, size * heads, size * layers);
      context.fillStyle = getComputedStyle(grid).backgroundColor; // of future keys, as in the enlarged map
      grid.style.background = "none";
      for (let layer = 0; layer < layers; layer++) {
        const name = made("span", "layer", grid, layer % Math.ceil(14 / size) ? "" : `${layer}`);
        name.style.top = `${(layers - 1 - layer) * size}px`;
        name.style.height = `${size}px`;
        for (let head = 0; head < heads; head++) {
          const n = layer * heads + head, cells = rows * columns, from = n * cells;
          const tile = panel.tiles.subarray(from, from + cells), most = own ? largest(tile) || 1 : limit;
          const picture = coloured(
            tile, rows, columns, panel.signed ? -most : 0, most,
            panel.signed ? colours.diverging : colours.sequential, root,
          );
          context.fillRect(head * size, (layers - 1 - layer) * size, size - 2, size - 2);
          stamped(context, picture, head * size, (layers - 1 - layer) * size, size - 2, size - 2);
          this.addHead(grid, panel, i, layer, head, size);
        }
      }
      const names = made("div", "columns", box);
      for (let head = 0; head < heads; head += Math.ceil(16 / size)) {
        const name = made("span", "", names, `${head}`);
        name.style.left = `${head * size}px`;
        name.style.width = `${size}px`;
      }
      made("div", "axis", box, "layers upwards, heads to the right");
      if (own) made("div", "axis", box, "brightest: each head's own largest weight");
      else this.legend(box, panel, panel.signed ? -limit : 0, limit, "share of attention");
      this.drawNumbers(box, panel);
    });
  }

  drawNumbers(box, panel) {
    const n = this.data.layer * panel.shape[1] + this.data.head, list = made("dl", "numbers", box);
    const add = (name, value, evenly) => {
      made("dt", "", list, name);
      made("dd", "", list, value);
      made("dd", "evenly", list, panel.signed ? "" : evenly);
    };
    const shown = panel.signed ? signed : number;
    add(`Layer ${this.data.layer}, head ${this.data.head}`, panel.signed ? "A − B" : "here", "uniform");
    add("normalised entropy", shown(panel.entropy[n]), number(1));
    add("effective keys", shown(panel.keys_used[n]), number(panel.evenly.effective_keys));
    add("first token", shown(panel.sink[n]), number(panel.evenly.sink_mass));
  }

  addHead(grid, panel, i, layer, head, size) {
    const { layers, heads } = this.data, n = layer * panel.shape[1] + head;
    const chosen = layer === this.data.layer && head === this.data.head;
    const button = made("button", chosen ? "head chosen" : "head", grid);
    const numbers = panel.signed ? "" : `: normalised entropy ${number(panel.entropy[n])}, ` +
      `${number(panel.keys_used[n])} effective keys, ${number(panel.sink[n])} to the first token`;
    button.type = "button";
    button.title = `Layer ${layer}, head ${head}${numbers}`;
    button.setAttribute("aria-label", `${panel.tag ? panel.tag + ": " : ""}${button.title}`);
    button.setAttribute("aria-pressed", `${chosen}`);
    button.dataset.place = `head-${i}-${layer}-${head}`;
    button.tabIndex = chosen ? 0 : -1;
    Object.assign(button.style, {
      left: `${head * size}px`, top: `${(panel.shape[0] - 1 - layer) * size}px`, width: `${size - 2}px`, height: `${size - 2}px`,
    });
    button.disabled = layer >= layers || head >= heads; // the other model has no such head
    if (button.disabled) button.title += " (the other model has no such head)";
    button.addEventListener("click", () => this.choose(layer, head));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      grid.querySelector(`[data-place="head-${i}-${layer + step[0]}-${head + step[1]}"]:not(:disabled)`)?.focus();
    });
  }

  choose(layer, head) {
    for (const button of this.heads.querySelectorAll(".head")) {
      const chosen = button.dataset.place.endsWith(`-${layer}-${head}`);
      button.classList.toggle("chosen", chosen);
      button.setAttribute("aria-pressed", `${chosen}`);
    }
    this.ask({ head: [layer, head] });
  }

  legend(box, panel, low, high, says) {
    const legend = made("div", "legend", box), canvas = document.createElement("canvas");
    const table = panel.signed ? this.data.colours.diverging : this.data.colours.sequential;
    made("span", "", legend, panel.signed ? signed(low) : number(low));
    legend.append(canvas);
    made("span", "", legend, panel.signed ? signed(high) : number(high));
    made("span", "says", legend, panel.signed ? "above 0: more in A" : says);
    legend.title = panel.signed ? "A minus B, separate scale" : "brighter: more; larger weights have the last colour";
    const ends = panel.signed ? -1 : 0, steps = Float32Array.from({ length: 256 }, (_, i) => ends + ((1 - ends) * i) / 255);
    const ramp = coloured(steps, 1, 256, ends, 1, table, this.data.root);
    stamped(sized(canvas, 72, 9), ramp, 0, 0, 72, 9);
  }

  // ---- one head

  drawMaps(width) {
    const { panels, layer, head, cell, whole, minus } = this.data;
    this.maps.replaceChildren();
    const line = made("div", "headline", this.maps);
    made("h2", "", line, `Layer ${layer}, head ${head}`);
    const all = made("button", "reset", line, "Whole prompt");
    all.type = "button";
    all.addEventListener("click", () => this.ask({ whole: true }));
    made("div", "where", this.maps, cell);
    this.maps.append(this.readout);
    const row = made("div", width < NARROW ? "panels narrow" : "panels", this.maps);
    const ticked = panels.filter((_, i) => i === 0 || !minus).length; // the same tokens are named once
    const narrow = width < NARROW; // one below the other, each with its names
    const side = narrow ? width - TICKS - 4 : Math.floor((width - ticked * TICKS - GUTTER * (panels.length - 1) - 4) / panels.length);
    this.side = Math.max(120, Math.min(MAP, window.innerHeight - AROUND, side));
    const top = whole ? 1 : Math.max(...panels.filter((p) => !p.signed).map((p) => p.scale[1]));
    const most = Math.max(...panels.filter((p) => !p.signed).map((p) => Math.max(largest(p.received), largest(p.received_evenly))));
    panels.forEach((panel, i) => this.drawMap(row, panel, i, top, most, narrow || i === 0 || !minus));
    made("p", "help", this.maps, "Hover: read a cell. Click: select its query and key. Drag: zoom in. Double click: zoom out. " +
      "Keys: arrows move, Enter selects, Escape deselects, + and − zoom, 0 shows the whole prompt.");
  }

  drawMap(parent, panel, i, top, most, named) {
    const { colours, root } = this.data, side = this.side, rows = panel.queries.length - 1, columns = panel.keys.length - 1;
    const box = made("div", "panel", parent);
    box.style.paddingLeft = named ? `${TICKS}px` : "0";
    box.style.width = `${side + (named ? TICKS : 0)}px`;
    if (this.data.panels.length > 1) made("h3", "", box, panel.title);
    const limit = panel.signed ? largest(panel.weights) || 1 : top;
    const map = made("div", "map", box), canvas = made("canvas", "", map);
    map.style.width = map.style.height = `${side}px`;
    const picture = coloured(panel.weights, rows, columns, panel.signed ? -limit : 0, limit,
      panel.signed ? colours.diverging : colours.sequential, root);
    stamped(sized(canvas, side, side), picture, 0, 0, side, side);
    panel.rowBand = made("div", "band", map);
    panel.columnBand = made("div", "band", map);
    panel.lockBand = made("div", "lock", map);
    panel.keyBand = made("div", "key", map);
    panel.rectangle = made("div", "rectangle", map);
    this.place(panel, "lockBand", this.lockedRow(panel), null);
    this.place(panel, "keyBand", null, panel.row && this.data.key !== null ? cellOf(panel.keys, this.data.key) : null);
    if (named) this.ticks(map, panel.queries, panel.query_tokens, rows, true);
    map.tabIndex = 0;
    map.dataset.place = `map-${i}`;
    map.setAttribute("role", "application");
    map.setAttribute("aria-roledescription", "attention map");
    map.setAttribute("aria-label", `${panel.title}: layer ${this.data.layer}, head ${this.data.head}. Queries downwards, keys to the right. Arrow keys read cells`);
    this.listen(map, panel, rows, columns);
    const strip = made("canvas", "strip", box);
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", `Received attention of ${panel.title}: ${this.peak(panel)}`);
    this.drawStrip(strip, panel, panel.signed ? largest(panel.received) || 1 : most);
    this.ticks(box, panel.keys, panel.key_tokens, columns, false);
    made("div", "axis", box, `${i ? "" : "Rows: queries; columns: keys. Bars: attention that a key receives (square root), "}` +
      this.peak(panel) + (i ? "" : "; dots: uniform attention"));
    this.legend(box, panel, panel.signed ? -limit : 0, limit, "attention");
  }

  peak(panel) {
    let at = 0;
    panel.received.forEach((v, i) => { if (Math.abs(v) > Math.abs(panel.received[at])) at = i; });
    return `${panel.signed ? "largest difference" : "largest"} at key ${span(panel.keys, at)}, ${number(panel.received[at])} queries`;
  }

  ticks(parent, edges, tokens, count, vertical) {
    const every = Math.ceil((count * TICK) / this.side), box = made("div", vertical ? "ticks rows" : "ticks keys", parent);
    box.setAttribute("aria-hidden", "true");
    for (let n = 0; n < count; n += every) {
      const single = edges[n + 1] === edges[n] + 1;
      const tick = made("span", "tick", box), at = `${((n + 0.5) * this.side) / count}px`;
      tick.style[vertical ? "top" : "left"] = at;
      made("i", "", tick, single ? `${edges[n]}` : span(edges, n));
      if (single) made("bdi", "", tick, tokens[n]);
    }
    if (!vertical) box.style.height = `${Math.max(...[...box.children].map((tick) => tick.offsetHeight)) + 4}px`;
  }

  drawStrip(canvas, panel, most) {
    const context = sized(canvas, this.side, STRIP), count = panel.received.length, each = this.side / count;
    const style = getComputedStyle(this.root), zero = panel.signed ? STRIP / 2 : STRIP, reach = panel.signed ? STRIP / 2 : STRIP;
    const height = (v) => Math.sign(v) * Math.sqrt(Math.abs(v) / most) * (reach - 1);
    context.fillStyle = panel.colour;
    panel.received.forEach((v, i) => context.fillRect(i * each, zero, Math.max(1, each - (each > 4 ? 1 : 0)), -height(v)));
    context.fillStyle = style.color;
    panel.received_evenly.forEach((v, i) => context.fillRect((i + 0.5) * each - 0.75, zero - height(v) - 0.75, 1.5, 1.5));
  }

  // ---- reading, holding, zooming

  listen(map, panel, rows, columns) {
    const cell = (event) => {
      const box = map.getBoundingClientRect();
      const clip = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
      return [clip((event.clientY - box.top) / box.height, rows), clip((event.clientX - box.left) / box.width, columns)];
    };
    let from = null, dragged = false;
    map.addEventListener("pointermove", (event) => {
      const at = cell(event);
      if (from && (dragged || Math.hypot(event.clientX - from.x, event.clientY - from.y) > 4)) {
        dragged = true;
        this.outline(panel, from.at, at, rows, columns);
      }
      this.point(panel, at[0], at[1]);
    });
    map.addEventListener("pointerleave", () => { if (!from) this.point(panel, null); });
    map.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = { at: cell(event), x: event.clientX, y: event.clientY };
      dragged = false;
      map.setPointerCapture(event.pointerId);
    });
    map.addEventListener("pointercancel", () => { from = null; panel.rectangle.style.display = "none"; });
    map.addEventListener("pointerup", (event) => {
      if (!from) return;
      const start = from.at, end = cell(event);
      from = null;
      if (dragged) this.zoom(panel, Math.min(start[0], end[0]), Math.max(start[0], end[0]),
        Math.min(start[1], end[1]), Math.max(start[1], end[1]));
    });
    map.addEventListener("click", (event) => {
      if (dragged) return;
      const [r, c] = cell(event);
      clearTimeout(this.waiting); // a second click within the wait is a double click
      if (event.detail < 2) this.waiting = setTimeout(() => this.hold(panel, r, c), WAIT);
    });
    map.addEventListener("dblclick", () => { clearTimeout(this.waiting); this.ask({ whole: true }); });
    map.addEventListener("blur", () => this.point(panel, null));
    map.addEventListener("keydown", (event) => this.key(event, panel, rows, columns));
  }

  key(event, panel, rows, columns) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [r, c] = this.cursor || [rows - 1, 0], far = event.shiftKey ? 10 : 1;
    const move = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far],
      Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] }[event.key];
    const clip = (n, count) => Math.max(0, Math.min(count - 1, n));
    if (move) this.point(panel, this.cursor ? clip(r + move[0], rows) : r, this.cursor ? clip(c + move[1], columns) : c);
    else if (event.key === "Enter" || event.key === " ") this.hold(panel, r, c);
    else if (event.key === "Escape") this.data.lock !== null && this.ask({ lock: null });
    else if (event.key === "+" || event.key === "=") this.zoom(panel, clip(r - (rows >> 2), rows), clip(r + (rows >> 2), rows),
      clip(c - (columns >> 2), columns), clip(c + (columns >> 2), columns));
    else if (event.key === "-" || event.key === "0") this.ask({ whole: true });
    else return;
    event.preventDefault();
  }

  hold(panel, row, column) {
    if (!this.shares(panel, this.data.panels[0])) return; // these are not A's tokens, whose query is held
    const query = panel.queries[row], key = panel.exact && panel.keys[column] <= query ? panel.keys[column] : null;
    this.ask({ lock: query === this.data.lock && key === this.data.key ? null : query, key });
  }

  zoom(panel, top, bottom, left, right) {
    this.ask({ window: [panel.queries[top], panel.queries[bottom + 1] - 1, panel.keys[left], panel.keys[right + 1] - 1] });
  }

  shares(panel, other) {
    return panel === other || this.data.minus; // maps that are subtracted have the same tokens
  }

  outline(panel, a, b, rows, columns) {
    const side = this.side, [top, bottom] = [Math.min(a[0], b[0]), Math.max(a[0], b[0]) + 1];
    const [left, right] = [Math.min(a[1], b[1]), Math.max(a[1], b[1]) + 1];
    Object.assign(panel.rectangle.style, {
      display: "block", top: `${(top * side) / rows}px`, height: `${((bottom - top) * side) / rows}px`,
      left: `${(left * side) / columns}px`, width: `${((right - left) * side) / columns}px`,
    });
  }

  lockedRow(panel) {
    const { lock } = this.data;
    return lock === null || !panel.row ? null : cellOf(panel.queries, lock);
  }

  place(panel, band, row, column) {
    if (!panel[band]) return; // not drawn yet: the old map lost the focus
    const style = panel[band].style, side = this.side;
    style.display = row === null && column === null ? "none" : "block";
    if (row !== null) {
      const each = side / (panel.queries.length - 1), height = Math.max(1, each);
      Object.assign(style, { top: `${row * each}px`, height: `${height}px`, left: "0", width: "100%" });
    } else if (column !== null) {
      const each = side / (panel.keys.length - 1), width = Math.max(1, each);
      Object.assign(style, { left: `${column * each}px`, width: `${width}px`, top: "0", height: "100%" });
    }
  }

  point(at, row, column) {
    this.cursor = row === null ? null : [row, column];
    this.pointed = at;
    const named = row !== null && this.shares(at, this.data.panels[0]); // other elements have A's tokens
    this.pointing.tell(named ? at.queries[row] : null, named ? at.keys[column] : null);
    for (const panel of this.data.panels) {
      const inside = row !== null && this.shares(panel, at) && row < panel.queries.length - 1 && column < panel.keys.length - 1;
      this.place(panel, "rowBand", inside ? row : null, null);
      this.place(panel, "columnBand", null, inside ? column : null);
    }
    for (const chip of this.held.querySelectorAll(".chip"))
      chip.classList.toggle("pointed", row !== null && this.shares(at, this.data.panels[0]) && chip.dataset.column === `${column}`);
    this.say();
  }

  mark(query, key) { // what is pointed at elsewhere, of A's tokens; the readout and the arrow keys keep their cell
    if (!this.data) return;
    if (query === null && this.cursor) this.point(this.pointed, ...this.cursor);
    else this.bands(query, key);
  }

  bands(query, key) {
    for (const panel of this.data.panels) {
      const named = query !== null && this.shares(panel, this.data.panels[0]);
      this.place(panel, "rowBand", named ? cellOf(panel.queries, query) : null, null);
      this.place(panel, "columnBand", null, named ? cellOf(panel.keys, key) : null);
    }
  }

  say() {
    const text = (words) => this.readout.append(words);
    const token = (words) => made("bdi", "token", this.readout, words);
    this.readout.replaceChildren();
    const { lock, key, panels } = this.data, first = this.cursor ? this.pointed : panels[0];
    const selected = lock === null || key === null ? [null] : [cellOf(first.queries, lock), cellOf(first.keys, key)];
    if (!this.cursor && selected.includes(null)) return text("Hover over a cell.");
    const [r, c] = this.cursor ?? selected;
    if (r >= first.queries.length - 1 || c >= first.keys.length - 1) return undefined;
    text(`query ${span(first.queries, r)} `);
    token(first.query_tokens[r]);
    text(` → key ${span(first.keys, c)} `);
    token(first.key_tokens[c]);
    text(first.keys[c] >= first.queries[r + 1] ? ": the future, which it cannot see" : ": ");
    if (first.keys[c] >= first.queries[r + 1]) return undefined;
    for (const panel of this.data.panels) {
      const columns = panel.keys.length - 1;
      if (!this.shares(panel, first)) continue;
      if (r >= panel.queries.length - 1 || c >= columns) continue;
      const value = panel.weights[r * columns + c];
      text(panel.tag ? ` ${panel.tag} ` : "");
      made("b", "", this.readout, panel.signed ? signed(value) : number(value));
    }
    if (!first.exact) text(this.data.mean ? " of a query's attention goes to all these keys" : " the largest weight in there");
    return undefined;
  }

  // ---- the held query

  drawHeld() {
    const { panels, lock, held } = this.data, shown = panels.filter((p) => p.row);
    this.held.replaceChildren();
    if (lock === null || !shown.length) return;
    const line = made("div", "headline", this.held), title = made("h2", "", line, `Query ${lock} `);
    made("bdi", "token", title, held);
    title.append(`, layer ${this.data.layer}, head ${this.data.head}`);
    const off = made("button", "reset", line, "Deselect");
    off.type = "button";
    off.dataset.place = "let-go";
    off.addEventListener("click", () => this.ask({ lock: null }));
    const first = shown[0], last = first.keys[first.keys.length - 1] - 1;
    if (first.keys[0] > 0 || last < lock) made("span", "where", line, `of keys ${first.keys[0]}–${Math.min(last, lock)}, the columns shown`);
    const bars = shown.filter((p) => !p.signed && p.keys.length === first.keys.length);
    const most = this.data.whole ? 1 : Math.max(...bars.map((p) => largest(p.row))) || 1;
    const lifted = (share) => (this.data.root ? Math.sqrt(share) : share);
    made("span", "where", line, `highest bar ${number(most)}${this.data.root ? ", heights by square root as the colours" : ""}`);
    if (panels.length > 1) {
      const names = made("div", "names", this.held);
      for (const panel of bars) {
        made("span", "swatch", names).style.background = panel.colour;
        made("span", "", names, panel.title);
      }
    }
    const chips = made("ol", "chips", this.held), columns = first.keys.length - 1;
    for (let c = 0; c < columns && first.keys[c] <= lock; c++) {
      const chip = made("li", "chip", chips), box = made("div", "bars", chip);
      chip.dataset.column = `${c}`;
      const values = bars.map((p) => number(p.row[c])).join(" and ");
      for (const panel of bars) {
        const bar = made("span", "bar", box);
        bar.style.height = `${Math.round(100 * lifted((panel.row[c] || 0) / most))}%`;
        bar.style.background = panel.colour;
      }
      const single = first.keys[c + 1] === first.keys[c] + 1;
      made("bdi", "", chip, single ? first.key_tokens[c] : span(first.keys, c));
      chip.title = `key ${span(first.keys, c)}: ${values}`;
      chip.setAttribute("aria-label", `key ${span(first.keys, c)} ${single ? first.key_tokens[c] : ""}: ${values}`);
    }
  }
}
