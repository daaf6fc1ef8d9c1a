// A prompt's tokens as coloured chips, one of them chosen. Text enters through textContent alone.

const SETTLED = 250; // ms that the arrow keys rest before what they reached is chosen

export default shown((parent) => new Strip(parent), (data) => data);

const alike = (a, b) => a.length === b.length && a.every((v, i) => v === b[i]);

class Strip {
  constructor(parent) {
    this.root = made("div", "strip", parent);
    const line = made("div", "line", this.root);
    this.label = made("span", "label", line);
    this.label.setAttribute("aria-hidden", "true"); // the list has this name
    this.readout = made("span", "readout", line);
    this.legend = made("span", "legend", line);
    this.list = made("div", "tokens", this.root);
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-orientation", "horizontal");
    this.chips = [];
    this.place = this.marked = this.waiting = null; // the chosen chip, the pointed ones, the timer
    this.listen();
    this.watch = new ResizeObserver(() => this.see(this.place));
    this.watch.observe(this.root);
  }

  leave() {
    this.watch.disconnect();
    clearTimeout(this.waiting);
    this.pointing.leave();
  }

  show(data) {
    const old = this.data;
    this.data = data;
    this.pointing ??= new Pointing(data.key, (...indices) => this.mark(indices));
    const same = old && old.first === data.first && alike(old.tokens, data.tokens);
    if (!same) this.build();
    if (!same || old.top !== data.top || old.unit !== data.unit || !alike(old.values, data.values)) this.paint();
    this.label.textContent = data.label;
    this.list.setAttribute("aria-label", data.label);
    if (this.waiting === null) this.ring(data.chosen === null ? null : data.chosen - data.first); // else the keys are further on
  }

  // ---- drawing

  build() {
    const all = document.createDocumentFragment(), { tokens } = this.data;
    clearTimeout(this.waiting);
    this.place = this.marked = this.waiting = this.stop = null;
    this.pointing.tell(null);
    this.chips = tokens.map((text, i) => {
      const chip = made("span", "token", all, text);
      chip.setAttribute("role", "option");
      chip.setAttribute("aria-selected", "false");
      chip.tabIndex = -1;
      chip.dataset.i = i;
      if (text.includes("↵")) made("br", "", all);
      return chip;
    });
    this.list.replaceChildren(all);
  }

  paint() {
    const { values, top, most, colours, unit } = this.data, last = colours.length - 1;
    this.chips.forEach((chip, i) => {
      const v = values[i], share = v === null ? null : Math.max(0, Math.min(1, v / top));
      const [ground, ink] = v === null ? ["", ""] : colours[Math.round(share * last)];
      chip.style.background = ground;
      chip.style.color = ink;
      chip.title = `position ${i + this.data.first}\n${this.exact(i)}${v === null ? "" : `\n${this.value(i)}`}`;
    });
    this.legend.replaceChildren();
    if (top === null) return;
    made("span", "", this.legend, "0");
    const ramp = made("span", "ramp", this.legend);
    ramp.style.background = `linear-gradient(to right, ${colours.map((c) => c[0]).join(", ")})`;
    const beyond = most > top;
    made("span", "", this.legend, `${beyond ? "≥ " : ""}${top}${unit && " "}${unit}${beyond ? `, up to ${most}` : ""}`);
    this.legend.title = beyond ? `values from ${top} to ${most} have the last colour` : "";
  }

  exact(i) {
    return this.data.cut[i] ?? this.data.tokens[i];
  }

  value(i) {
    return `${number(this.data.values[i])} ${this.data.unit}`.trim();
  }

  ring(place) {
    if (place !== this.place) {
      for (const [i, on] of [[this.place, false], [place, true]]) {
        this.chips[i]?.classList.toggle("chosen", on);
        this.chips[i]?.setAttribute("aria-selected", `${on}`);
      }
      this.place = place;
      this.see(place);
    }
    const inside = this.chips.indexOf(this.list.getRootNode().activeElement);
    this.reach(inside < 0 ? place ?? 0 : inside);
    this.say();
  }

  reach(i) { // the one chip that the tabulator comes to
    if (this.stop) this.stop.tabIndex = -1;
    this.stop = this.chips[i];
    this.stop.tabIndex = 0;
  }

  see(i) { // scrolls the strip, never the page
    const chip = this.chips[i], list = this.list;
    if (!chip || !list.clientHeight) return;
    const room = (list.clientHeight - chip.offsetHeight) / 2, top = chip.offsetTop - list.scrollTop;
    if (top < 4 || top + chip.offsetHeight > list.clientHeight - 4) list.scrollTop = chip.offsetTop - room;
  }

  say(pointed = null) { // the chosen token, and behind it the one pointed at
    this.readout.replaceChildren();
    for (const [i, name] of [[this.place, "now"], [pointed, "passing"]]) {
      if (i === null || (name === "passing" && i === this.place)) continue;
      const words = made("span", name, this.readout);
      made("span", "", words, `${i + this.data.first}`);
      made("bdi", "", words, this.data.tokens[i]);
      if (this.data.values[i] !== null) made("span", "", words, `${this.value(i)} ${name === "now" ? this.data.own : ""}`.trim());
    }
  }

  // ---- choosing and pointing

  listen() {
    const at = (event) => {
      const chip = event.target.closest(".token");
      return chip ? Number(chip.dataset.i) : null;
    };
    this.list.addEventListener("click", (event) => at(event) !== null && this.take(at(event)));
    this.list.addEventListener("pointerover", (event) => this.point(at(event)));
    this.list.addEventListener("pointerleave", () => this.point(null));
    this.list.addEventListener("focusin", (event) => at(event) !== null && this.reach(at(event)));
    this.list.addEventListener("focusout", () => this.point(null));
    this.list.addEventListener("keydown", (event) => this.key(event, at(event)));
  }

  key(event, i) {
    if (i === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.chips.length - 1;
    const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" || event.key === " ") this.take(i);
    else if (to === undefined) return;
    else if (to !== i && to >= 0 && to <= last) this.move(to);
    event.preventDefault();
  }

  move(i) {
    this.chips[i].focus({ preventScroll: true });
    this.ring(i);
    this.point(i);
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.choose(i), SETTLED);
  }

  take(i) {
    if (i !== this.place || this.waiting !== null) this.choose(i);
    else if (this.data.none) this.choose(null);
  }

  choose(i) {
    clearTimeout(this.waiting);
    this.waiting = null;
    this.ring(i);
    this.ask({ token: i === null ? null : i + this.data.first });
  }

  point(i) {
    this.mark(i === null ? [] : [i + this.data.first]);
    this.pointing.tell(i === null ? null : i + this.data.first);
  }

  mark(indices) {
    const places = indices.filter((n) => n !== null).map((n) => n - this.data.first).filter((i) => this.chips[i]);
    for (const chip of this.marked ?? []) chip.classList.remove("pointed");
    this.marked = places.map((i) => this.chips[i]);
    for (const chip of this.marked) chip.classList.add("pointed");
    this.say(places[0]);
  }
}
