// A plotly figure that stays on the page while its numbers change. Clicks are told; which token is pointed at is told and marked.

export default shown((parent) => new Figure(parent), (bytes) => new TextDecoder().decode(bytes));

const plotly = () => window.wbPlotly ??= window.Plotly ? Promise.resolve() : new Promise((loaded, failed) => { // once for all figures
  const script = made("script", "", document.head);
  script.onload = loaded;
  script.onerror = () => failed(new Error("the plotting library cannot be loaded"));
  script.src = document.querySelector('link[as="script"][data-plotly]').href;
});

const NARROW = 600, PANEL = 300, BETWEEN = 90, BAR = 70, LINE = 17, MOST = 8, LEAST = 270, TALL = 800; // pixels: of a figure, of each panel more that stands beside another, between two below each other, of a colour bar
const TOKEN = /^(\d+):/; // an axis of tokens has names such as 5:word
const STILL = { displayModeBar: false, displaylogo: false, showSendToCloud: false };

class Figure {
  constructor(parent) {
    this.root = made("div", "wb-figure", parent);
    this.root.setAttribute("role", "figure");
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusout", () => {
      if (this.at) window.Plotly.Fx.unhover(this.plot), this.pointing.tell((this.at = null));
    });
    this.names = made("div", "names", this.root);
    this.names.setAttribute("aria-hidden", "true");
    this.root.addEventListener("scroll", () => this.nameRows());
    this.plot = made("div", "", this.root);
    this.bands = [];
    this.turn = Promise.resolve();
    this.pointing = new Pointing(this, (...tokens) => this.mark(tokens));
    this.watch = new ResizeObserver(() => this.fit());
    this.watch.observe(this.root);
  }

  leave() {
    this.gone = true;
    this.watch.disconnect();
    this.pointing.leave();
    if (this.drawn) window.Plotly.purge(this.plot);
  }

  show(text) {
    this.text = text;
    this.next();
  }

  next() { // one after another; what went wrong with one is told, and the next is tried
    this.turn = this.turn.then(plotly).then(() => this.gone || this.draw()).catch((error) => console.error(error));
  }

  async draw() { // unless these numbers have been drawn to this width
    if (this.text === this.drawn && (!this.root.clientWidth || this.room() === this.width)) return;
    const text = this.text, { data, layout, frames, alt, clicked } = JSON.parse(text), style = getComputedStyle(this.root);
    this.clicked = clicked;
    this.root.setAttribute("aria-label", alt);
    this.least = layout.meta?.least ?? 0;
    const columns = abreast(layout);
    if (layout.legend?.y < 0) Object.assign(layout.legend, BELOW); // its place in shares of the axes is another one at each height
    if (columns > 1 && this.root.clientWidth < this.least) {
      stacked(layout);
      this.least /= columns;
    }
    layout.width = this.width = this.room();
    if (layout.meta?.most < layout.width) layout.width = layout.meta.most;
    squared(layout);
    const named = this.ends;
    this.ends = atEnds(data, layout);
    const anew = frames || this.plays || !this.drawn || !named !== !this.ends; // plotly keeps the room of a legend that is gone
    if (!this.ends) under(data, layout);
    legible(data, layout);
    this.plot.style.height = `${layout.height}px`;
    layout.uirevision = layout.meta?.title?.text ?? ""; // the same measure keeps its zoom
    layout.template = { layout: {
      font: { family: style.fontFamily, color: style.color }, xaxis: { showgrid: false, zeroline: false },
      hoverlabel: { font: { family: style.fontFamily } },
    } };
    if (anew) {
      if (this.drawn) window.Plotly.purge(this.plot);
      await window.Plotly.newPlot(this.plot, { data, layout, frames: frames ?? [], config: STILL });
      this.listen();
    } else await window.Plotly.react(this.plot, data, layout, STILL);
    this.plays = Boolean(frames);
    this.drawn = text;
    await this.nameLines();
    if (!frames && !layout.updatemenus) await this.tighten();
    await this.thin();
    this.nameRows();
    this.mark([]);
    this.admit();
    this.reveal();
  }

  async nameLines() { // at the lines' ends, in the order of their last numbers, none over another
    if (!this.ends) return;
    const { yaxis, annotations } = this.plot._fullLayout, { _length: high } = yaxis, own = annotations.filter(({ name }) => name !== "line");
    const names = this.ends.map((trace) => ({ ...trace, y: Math.max(0, Math.min(high, yaxis.c2p(yaxis.d2c(trace.last)))) }));
    names.sort((a, b) => a.y - b.y);
    names.forEach((line, i) => (line.y = Math.max(line.y, i ? names[i - 1].y + LINE : 0)));
    names.reverse().forEach((line, i) => (line.y = Math.min(line.y, i ? names[i - 1].y - LINE : high)));
    const notes = names.map(({ name, mark, y }) => ({
      name: "line", text: `${mark} ${name}`, showarrow: false, xref: "paper", yref: "paper", x: 1, y: 1 - y / high, yanchor: "middle", xanchor: "left", align: "left", xshift: 4,
    }));
    await window.Plotly.relayout(this.plot, { annotations: [...own.map((note) => note._input ?? note), ...notes] });
  }

  async tighten() { // the room between the axes and what is below them: the legend, else the end of the figure
    const boxes = (names) => [...this.plot.querySelectorAll(names)].map((part) => part.getBoundingClientRect()).filter(({ height }) => height);
    const { height, margin, legend, showlegend } = this.plot._fullLayout, below = showlegend && legend?.orientation === "h" && !legend.y;
    const axes = boxes(".xaxislayer-above, .xaxislayer-below, [class^=g-x][class$=title]"), [key] = below ? boxes(".legend") : boxes(".main-svg");
    if (!axes.length || !key || (below && legend.yref !== "container")) return;
    const more = Math.round(12 - (below ? key.top : key.bottom) + Math.max(...axes.map(({ bottom }) => bottom)));
    if (Math.abs(more) < 6 || margin.b + more < 0) return;
    this.plot.style.height = `${height + more}px`;
    await window.Plotly.relayout(this.plot, { height: height + more, "margin.b": margin.b + more });
  }

  async thin() { // upright names that would overlap: every second, every third
    const few = {}, { _plots: plots } = this.plot._fullLayout;
    for (const { xaxis } of Object.values(plots)) {
      const { _categories: names, tickvals, tickangle, _length: length, _name: name } = xaxis;
      if (tickangle !== -90 || !names?.length || !tickvals?.length) continue;
      const every = Math.ceil((11 * tickvals.length) / length);
      if (every > 1) few[`${name}.tickvals`] = tickvals.filter((_, i) => i % every === 0);
    }
    if (Object.keys(few).length) await window.Plotly.relayout(this.plot, few);
  }

  nameRows() { // the left margin of a map stays in sight where it scrolls, as do the names of panels
    const { _plots: plots, _size: size, annotations } = this.plot._fullLayout ?? {}, at = this.root.scrollLeft;
    this.names.replaceChildren();
    if (!plots || at < 1 || this.width <= this.root.clientWidth) return;
    const px = (sizes) => Object.fromEntries(Object.entries(sizes).map(([key, size]) => [key, `${size}px`]));
    const name = (text, top, parent = this.names) => Object.assign(made("span", "", parent, text).style, px({ top }));
    for (const { xaxis, yaxis } of Object.values(plots)) {
      if (xaxis._offset >= this.width / 4 || !yaxis._categories?.length) continue;
      const margin = made("div", "", this.names), { text, font } = yaxis.title;
      Object.assign(margin.style, px({ top: yaxis._offset, width: xaxis._offset, height: yaxis._length + Math.max(8, xaxis._depth ?? 0) }));
      for (const row of yaxis._categories) name(row, yaxis.c2p(yaxis.d2c(row)), margin);
      if (yaxis._input.title?.text) Object.assign(made("b", "", margin, text).style, px({ height: yaxis._length, fontSize: font.size }));
    }
    for (const { text, x, y, xref } of annotations ?? []) {
      const middle = size.l + x * size.w - at;
      if (xref === "paper" && (middle < 4 * text.length || middle > this.root.clientWidth - 4 * text.length)) name(text, size.t + (1 - y) * size.h - 10);
    }
  }

  admit() { // keys scroll what is wider than its place, and choose a point where a click does
    const can = this.clicked || this.width > this.root.clientWidth;
    if (can && !this.root.hasAttribute("tabindex")) this.root.tabIndex = 0;
    else if (!can) this.root.removeAttribute("tabindex");
  }

  reveal() { // of a figure wider than its place the part where something is chosen, from the begin of a cell on
    const drawn = this.plot._fullLayout, chosen = drawn.shapes?.find(({ name }) => name === "chosen"), room = this.root.clientWidth;
    if (!chosen || this.width <= room) return;
    const axis = drawn[chosen.xref.replace("x", "xaxis")], cell = Math.abs(axis.r2p(1) - axis.r2p(0));
    const at = axis._offset + axis.r2p((chosen.x0 + chosen.x1) / 2), inside = (left) => at + cell / 2 - left <= room;
    const now = this.root.scrollLeft, most = this.width - room, seen = at - cell / 2 - now > axis._offset - 1 && inside(now);
    if (seen && now < most) return;
    const left = seen ? now : Math.max(0, Math.min(most, at - (room + axis._offset) / 2)), whole = left - (left % cell);
    this.root.scrollLeft = inside(whole) ? whole : left;
  }

  fit() { // to the width of its place, once that has a moment's rest: the second is for numbers that come with it while others are drawn
    const rest = (then) => (this.waiting = setTimeout(then, 50));
    clearTimeout(this.waiting);
    if (!this.drawn) return;
    this.admit();
    if (this.plot._fullLayout.width === this.room()) this.reveal(); // else it is drawn anew
    rest(() => rest(() => this.next()));
  }

  room() {
    return Math.max(this.root.clientWidth, this.least);
  }

  // ---- clicks, and tokens pointed at

  listen() {
    const tips = this.plot.querySelector(".hoverlayer"); // drawn anew under every move of the mouse
    if (tips) new MutationObserver(() => trueMinus(tips)).observe(tips, { childList: true, subtree: true });
    this.plot.on("plotly_click", ({ points: [at] }) => {
      if (this.clicked && at) this.ask({ at: at.customdata ?? null, x: at.x ?? null, y: at.y ?? null });
    });
    this.plot.on("plotly_hover", ({ points: [at] }) => {
      this.root.classList.toggle("over", Boolean(this.clicked && at));
      this.pointing.tell(at ? token(at.x) ?? token(at.y) : null);
    });
    this.plot.on("plotly_unhover", () => {
      this.root.classList.remove("over");
      this.pointing.tell(null);
    });
  }

  key(event) { // an arrow points at the next point that way, the enter key clicks it
    const way = WAYS[event.key];
    if (!this.clicked || event.target !== this.root || !(way || event.key === "Enter")) return;
    event.preventDefault();
    if (!way) return this.at && this.ask(this.at.told);
    const far = this.at ? (p) => ahead(p, this.at, way) : (p) => 1e4 * p.x + p.y;
    const [to] = points_of(this.plot).map((p) => [far(p), p]).filter(([d]) => d < Infinity).sort((a, b) => a[0] - b[0]).map(([, p]) => p);
    if (!to) return;
    this.at = to;
    window.Plotly.Fx.hover(this.plot, to.here, to.panel);
    this.pointing.tell(token(to.told.x) ?? token(to.told.y));
  }

  mark(tokens) { // a band over each pointed token, in each panel that has it
    const wanted = tokens.filter((n) => n !== null).flatMap((n) => this.places(n));
    while (this.bands.length < wanted.length) this.bands.push(made("div", "mark", this.root));
    this.bands.forEach((band, i) => Object.assign(band.style, wanted[i] ?? { display: "none" }));
  }

  places(n) {
    const { _plots: plots, _size: size } = this.plot._fullLayout ?? {};
    if (!size) return [];
    return Object.values(plots).flatMap(({ xaxis, yaxis }) => [[xaxis, yaxis, true], [yaxis, xaxis, false]].flatMap(([along, across, upright]) => {
      const name = along._categories?.find((c) => token(c) === n);
      if (name === undefined) return [];
      const at = along._categories.indexOf(name), ends = [along.r2p(at - 0.5), along.r2p(at + 0.5)].sort((a, b) => a - b);
      const begin = Math.max(0, ends[0]), long = Math.min(along._length, ends[1]) - begin;
      if (long <= 0) return [];
      const px = ([left, top, width, height]) => ({ display: "block", left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
      return [px(upright ? [along._offset + begin, across._offset, long, across._length] : [across._offset, along._offset + begin, across._length, long])];
    }));
  }
}

function trueMinus(label) { // of numbers in a tooltip, which plotly writes with a hyphen
  const texts = document.createTreeWalker(label, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/(^|[\s[(:])-(?=[\d.])/g, "$1−");
}

// ---- points by keys

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function points_of(plot) { // what can be pointed at: what a click there tells, and its place in pixels
  return plot._fullData.flatMap(({ xaxis, yaxis, z, x = [], y = [], customdata, visible, hoverinfo }, curveNumber) => {
    const panel = `${xaxis}${yaxis}`, axes = plot._fullLayout._plots[panel];
    if (!axes || visible !== true || hoverinfo === "skip") return [];
    const point = (at, i, j) => {
      const told = { at: at ?? null, x: x[i] ?? i, y: y[j] ?? j };
      const [xpx, ypx] = [[axes.xaxis, told.x], [axes.yaxis, told.y]].map(([axis, v]) => axis.c2p(axis.d2c(v)));
      const here = z ? { xpx, ypx } : [{ curveNumber, pointNumber: i }];
      return { told, panel, here, x: axes.xaxis._offset + xpx, y: axes.yaxis._offset + ypx };
    };
    const all = z
      ? z.flatMap((row, j) => Array.from(row, (_, i) => point(customdata?.[j]?.[i], i, j)))
      : Array.from(x, (_, i) => point(customdata?.[i], i, i));
    return all.filter((p) => Number.isFinite(p.x + p.y));
  });
}

function ahead(p, from, [right, down]) { // how far that way, then how far aside; not at all the other way
  const x = p.x - from.x, y = p.y - from.y, along = Math.round(right * x + down * y);
  return along > 0 ? 1e4 * along + Math.abs(down * x) + Math.abs(right * y) : Infinity;
}

const panels = (layout) => Object.keys(layout).filter((key) => key.startsWith("xaxis"));
const abreast = (layout) => new Set(panels(layout).map((key) => layout[key].domain?.[0] ?? 0)).size || 1;

function stacked(layout) { // panels beside each other, where there is no room for that, one below the other
  const keys = panels(layout), left = (key) => layout[key].domain?.[0] ?? 0;
  const lefts = [...new Set(keys.map(left))].sort((a, b) => a - b), tall = layout.height - layout.margin.t - layout.margin.b;
  const bottom = (key) => layout[key.replace("x", "y")].domain?.[0] ?? 0, bottoms = [...new Set(keys.map(bottom))].sort((a, b) => b - a);
  const pitch = bottoms.length > 1 ? (bottoms[0] - bottoms[1]) * tall : tall + BETWEEN, last = bottoms.length * lefts.length - 1;
  const whole = last * pitch + (1 - bottoms[0]) * tall; // row by row, as they are read
  const place = (y, column) => {
    const row = bottoms.findIndex((low) => low <= y);
    return ((last - row * lefts.length - column) * pitch + (y - bottoms[row]) * tall) / whole;
  };
  for (const note of layout.annotations ?? []) {
    if (note.xref !== "paper" || note.yref !== "paper") continue;
    note.y = place(note.y, lefts.findLastIndex((x) => x <= note.x));
    note.x = 0.5;
  }
  for (const key of keys) {
    const axis = layout[key.replace("x", "y")], column = lefts.indexOf(left(key));
    const low = bottom(key);
    axis.domain = (axis.domain ?? [0, 1]).map((y) => place(low, column) + ((y - low) * tall) / whole);
    if (column) axis.showticklabels = true;
  }
  for (const key of keys) layout[key].domain = [0, 1];
  layout.height += whole - tall;
}

function across(layout, key) { // pixels of a panel, without a colour bar
  const [begin, end] = layout[key]?.domain ?? [0, 1], bar = layout.coloraxis ? BAR : 0;
  return (layout.width - layout.margin.l - layout.margin.r - bar) * (end - begin);
}

function legible(data, layout) { // cells of a map carry their numbers where these fit
  for (const trace of data) {
    const texts = trace.type === "heatmap" && trace.texttemplate && Array.isArray(trace.text) ? trace.text.flat() : [];
    if (!texts.length || !texts.every((text) => /^[\d.e−]*$/.test(text))) continue;
    const longest = Math.max(...texts.map(({ length }) => length));
    if (across(layout, (trace.xaxis ?? "x").replace("x", "xaxis")) / decoded(trace.x).length < 5.3 * longest + 3) delete trace.texttemplate;
  }
}

function squared(layout) { // square maps that are narrower than high leave no room above and below them
  const axes = Object.keys(layout).filter((key) => key.startsWith("yaxis")).map((key) => layout[key]), { margin } = layout;
  if (!axes.length || !axes.every(({ scaleanchor }) => scaleanchor)) return;
  const rows = new Set(axes.map(({ domain }) => domain?.[0] ?? 0)).size, wide = Math.min(...panels(layout).map((x) => across(layout, x)));
  layout.height = Math.min(layout.height, margin.t + margin.b + rows * (wide + BETWEEN));
}

function atEnds(data, layout) { // the lines that are named where they end, if a figure has one panel, few lines and room; else nothing
  if (abreast(layout) > 1 || Object.keys(layout).some((key) => /^[xy]axis\d/.test(key)) || layout.updatemenus || layout.showlegend === false) return null;
  const named = data.filter(({ showlegend, name }) => showlegend !== false && name);
  if (named.some(({ type, mode }) => type !== "scatter" || !/lines/.test(mode))) return null;
  const last = ({ y }) => Array.from(decoded(y)).findLast(Number.isFinite);
  const lines = [...new Map(named.map((trace) => [trace.name, trace])).values()].filter((trace) => last(trace) !== undefined); // the subtitle says what the others are
  if (lines.length < (layout.showlegend ? 1 : 2) || lines.length > MOST) return null;
  const room = 24 + 6.6 * Math.max(...lines.map(({ name }) => name.length));
  if (layout.width - (layout.margin?.l ?? 80) - room < LEAST) return null;
  if (layout.legend?.orientation === "h" && layout.legend.yref === "container") (layout.height -= 30), (layout.margin.b -= 30);
  layout.showlegend = false;
  layout.margin.r = room;
  const dash = { dot: "┈", dash: "╌", dashdot: "┄" };
  const shape = ({ marker }) => SHAPES[[marker?.symbol].flat()[0]?.replace("-open", "")] ?? "●";
  return lines.map((t) => ({ name: t.name, last: last(t), mark: `<span style="color:${t.line?.color ?? t.marker?.color}">${dash[t.line?.dash] ?? shape(t)}</span>` }));
}

const SHAPES = { square: "■", diamond: "◆", "triangle-up": "▲", "triangle-down": "▼", cross: "✚", x: "✖", star: "★", hexagon: "⬢", pentagon: "⬟" };
const decoded = (values) => values?.bdata ? new KINDS[values.dtype](Uint8Array.from(atob(values.bdata), (c) => c.charCodeAt(0)).buffer) : values ?? [];
const KINDS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

function under(data, layout) { // a legend beside a narrow figure takes its place, as long names do; below it, they do not
  const named = data.filter(({ type, showlegend, name }) => ["scatter", "bar"].includes(type) && showlegend !== false && name);
  const names = [...new Set(named.map((trace) => trace.name))];
  if (!names.length || layout.showlegend === false || layout.legend?.orientation === "h") return;
  const entry = 60 + 7 * Math.max(...names.map((name) => name.length)), above = layout.height > TALL; // else it is far from the first panels
  if (!above && layout.width >= NARROW + PANEL * (abreast(layout) - 1) && entry < layout.width / 3) return;
  const more = 12 + 22 * Math.ceil(names.length / Math.max(1, Math.floor(layout.width / entry)));
  layout.legend = { ...layout.legend, ...BELOW, ...(above ? { y: 1, yanchor: "top" } : {}) };
  layout.height += more;
  layout.margin[above ? "t" : "b"] += more;
}

const BELOW = { orientation: "h", x: 0, xref: "container", xanchor: "left", y: 0, yref: "container", yanchor: "bottom" };
const token = (name) => typeof name === "string" && TOKEN.test(name) ? Number(name.match(TOKEN)[1]) : null;
