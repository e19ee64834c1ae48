"use strict";
// Draws what pages/__init__.py describes: every text becomes a text node, so nothing in a dataset's names is HTML.
const page = JSON.parse(document.getElementById("page").textContent);
const main = document.getElementById("main");
const HEIGHT = 210, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22;
const zooms = {};  // by column of the horizontal axis: [from, to]
let charts = [];

function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text", "rect"].includes(tag);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") made.style.cssText = value; else made.setAttribute(name, value);  // the policy forbids others
  }
  made.append(...children);
  return made;
}

// Numbers

const TIMES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]];
const SIZES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k", 1e3], [0, "", 1]];

/** [factor, name] of the unit in which a value is shown. */
function unitOf(value, kind) {
  const units = {seconds: TIMES, bytes: SIZES, "bytes/s": SIZES, share: [[0, "%", 0.01]]}[kind] || COUNTS;
  const size = kind === "seconds" ? value / 2 : value;  // 90 s, and not 1.5 min
  const [least, name, factor] = units.find(([one]) => size >= one) || units[units.length - 1];
  return [factor || least, (kind === "count" || kind === "dollars" || kind === "share" ? "" : " ") + name
    + (kind === "bytes/s" ? "/s" : "")];
}

function shown(value, kind = "count", [factor, name] = unitOf(Math.abs(value), kind)) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const digits = {maximumSignificantDigits: Math.max(3, String(Math.floor(Math.abs(value / factor))).length)};
  return (kind === "dollars" ? "$" : "") + (value / factor).toLocaleString("en-US", digits) + name;
}

function ticks(from, to, kind, count) {
  const unit = unitOf(Math.max(Math.abs(from), Math.abs(to)), kind), span = (to - from) / unit[0];
  const power = 10 ** Math.floor(Math.log10(span / count || 1));
  let step = power * [1, 2, 5, 10].find((one) => one * power * count >= span);
  if (kind === "count") step = Math.max(step, unit[0] === 1 && to > 2 ? 1 : 0);
  const found = [];
  for (let k = Math.ceil(from / unit[0] / step - 1e-9); k * step <= to / unit[0] + 1e-9; k++) {
    const value = k * step * unit[0] || 0;  // not -0
    found.push([value, value || kind === "share" ? shown(value, kind, unit) : "0"]);
  }
  return found;
}

// Plots

class Chart {
  constructor(about) {
    this.about = about;
    this.x = page.columns[about.x];
    this.hidden = new Set();
    this.tip = element("div", {class: "tip", hidden: ""});
    this.place = element("div", {class: "chart"});
    this.legend = element("div", {class: "legend"});
    this.reset = element("button", {type: "button", class: "reset", hidden: ""}, "Reset zoom");
    this.reset.onclick = () => this.zoom(null);
    const note = about.note ? [element("p", {class: "note"}, about.note)] : [];
    this.root = element("section", {}, this.reset, element("h2", {}, about.title), ...note, this.place, this.legend);
    about.series.forEach((series, k) => {
      const button = element("button", {type: "button"}, element("i", {style: `background:${color(k)}`}), series.name);
      button.onclick = () => {
        if (!this.hidden.delete(k)) this.hidden.add(k);
        button.classList.toggle("off");
        this.draw();
      };
      this.legend.append(button);
    });
    this.legend.hidden = about.series.length < 2;
  }

  zoom(range) {
    zooms[this.about.x] = range;
    charts.filter((one) => one.about.x === this.about.x).forEach((one) => one.draw());
  }

  /** The values of each series; hidden ones are null. */
  values() {
    return this.about.series.map(({of}, k) => this.hidden.has(k) ? null : page.columns[of[0]].map((value, i) => {
      if (of.length < 2 || value === null) return value;
      const by = page.columns[of[1]][i];
      return by > 0 ? value / by : null;
    }));
  }

  draw() {
    const {about, x} = this, width = this.place.clientWidth || 600, values = this.values();
    const start = about.log ? x[0] : Math.min(0, x[0]);
    const [from, to] = zooms[about.x] || [start, Math.max(x[x.length - 1], start + 1e-9)];
    const at = about.log ? Math.log10 : (value) => value;
    this.toX = (value) => LEFT + (at(value) - at(from)) / (at(to) - at(from) || 1) * (width - LEFT - RIGHT);
    this.ofX = (pixel) => {
      const place = at(from) + (pixel - LEFT) / (width - LEFT - RIGHT) * (at(to) - at(from));
      return about.log ? 10 ** place : place;
    };
    const seen = x.map((one, i) => one >= from && (about.intervals ? (i ? x[i - 1] : start) : one) <= to);
    const below = x.map(() => 0), bands = [];
    let top = about.top || 0;
    values.forEach((ys, k) => {
      if (!ys) return;
      const lower = about.stacked ? below.slice() : null;
      const upper = ys.map((y, i) => y === null ? null : (about.stacked ? below[i] += y : y));
      upper.forEach((y, i) => { if (seen[i] && y > top) top = y; });
      bands.push([k, lower, upper]);
    });
    top = top > (about.top || 0) ? top * 1.05 : top || 1;
    this.toY = (value) => HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
    const svg = element("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": about.title});
    this.grid(svg, width, from, to, top);
    for (const [k, lower, upper] of bands) svg.append(this.band(k, lower, upper, start));
    svg.append(element("rect", {x: 0, y: 0, width: LEFT - 1, height: HEIGHT - BOTTOM, style: "fill:var(--back)"}));
    this.labels(svg, top);
    for (const [place, text] of about.marks || []) {
      if (place < from || place > to) continue;
      const middle = this.toX(place);
      svg.append(element("line", {class: "mark", x1: middle, x2: middle, y1: TOP, y2: HEIGHT - BOTTOM}),
        element("text", {x: middle + 3, y: TOP + 9}, text));
    }
    this.cursor = element("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
    this.area = element("rect", {class: "zoom", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden"});
    svg.append(this.cursor, this.area);
    this.follow(svg, values, from, to);
    this.reset.hidden = !zooms[about.x];
    this.place.replaceChildren(svg, this.tip);
  }

  grid(svg, width, from, to, top) {
    for (const [value] of ticks(0, top, this.about.y_unit || "count", 4)) {
      const y = this.toY(value);
      svg.append(element("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y}));
    }
    const powers = [];
    for (let power = 10 ** Math.floor(Math.log10(from || 1)); power <= to; power *= 10) {
      const values = to < 200 * from ? [power, 2 * power, 5 * power] : [power];
      powers.push(...values.filter((one) => one >= from && one <= to).map((one) => [one, shown(one)]));
    }
    const found = this.about.log ? powers : ticks(from, to, this.about.x_unit || "count", Math.max(2, width / 110));
    for (const [value, label] of found) {
      const x = this.toX(value);
      const anchor = x > width - 30 ? "end" : x < LEFT + 20 ? "start" : "middle";
      svg.append(element("text", {x, y: HEIGHT - 6, "text-anchor": anchor}, label));
    }
  }

  labels(svg, top) {
    for (const [value, label] of ticks(0, top, this.about.y_unit || "count", 4)) {
      svg.append(element("text", {x: LEFT - 6, y: this.toY(value) + 4, "text-anchor": "end"}, label));
    }
  }

  /** A line, or an area between two lines. */
  band(k, lower, upper, start) {
    const points = (ys, i) => {
      const y = this.toY(ys[i]), right = this.toX(this.x[i]);
      return this.about.intervals ? [[this.toX(i ? this.x[i - 1] : start), y], [right, y]] : [[right, y]];
    };
    const runs = [];
    upper.forEach((y, i) => {
      if (y === null) return;
      if (i === 0 || upper[i - 1] === null) runs.push([]);
      runs[runs.length - 1].push(i);
    });
    const line = (list) => list.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    const path = runs.map((run) => {
      const over = run.flatMap((i) => points(upper, i));
      if (over.length < 2) over.push(over[0]);  // a dot
      return lower ? `M${line([...over, ...run.flatMap((i) => points(lower, i)).reverse()])}Z` : `M${line(over)}`;
    }).join("");
    const style = lower ? `fill:${color(k)};fill-opacity:.75` : `fill:none;stroke:${color(k)};stroke-width:1.7;stroke-linecap:round`;
    return element("path", {d: path, style: `${style};stroke-linejoin:round`, "data-name": this.about.series[k].name});
  }

  /** Show the values below the pointer, and zoom to what the mouse is dragged over. */
  follow(svg, values, from, to) {
    let began = null;
    const within = (event) => Math.min(to, Math.max(from, this.ofX(event.clientX - svg.getBoundingClientRect().left)));
    const drag = (value) => {
      const ends = [this.toX(began), this.toX(value)].sort((a, b) => a - b);
      this.area.setAttribute("x", ends[0]);
      this.area.setAttribute("width", ends[1] - ends[0]);
      this.area.setAttribute("visibility", "visible");
      return ends[1] - ends[0] > 8;
    };
    svg.onpointerdown = (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      began = within(event);
      svg.setPointerCapture(event.pointerId);
    };
    svg.onpointermove = (event) => {
      if (began !== null) drag(within(event));
      this.point(within(event), values, svg.clientWidth);
    };
    svg.onpointerup = (event) => {
      const end = within(event), range = began === null ? null : [began, end].sort((a, b) => a - b);
      if (range && drag(end)) this.zoom(range);
      else this.area.setAttribute("visibility", "hidden");
      began = null;
    };
    svg.ondblclick = () => this.zoom(null);
    svg.onpointerleave = () => {
      this.tip.hidden = true;
      this.cursor.setAttribute("visibility", "hidden");
    };
  }

  point(value, values, width) {
    let i = this.x.findIndex((one) => one >= value);
    if (i < 0) i = this.x.length - 1;
    if (!this.about.intervals && i && value - this.x[i - 1] < this.x[i] - value) i -= 1;
    const middle = this.toX(this.x[i]);
    this.cursor.setAttribute("x1", middle);
    this.cursor.setAttribute("x2", middle);
    this.cursor.setAttribute("visibility", "visible");
    const rows = values.map((ys, k) => ys && element("div", {}, element("i", {style: `background:${color(k)}`}),
      `${this.about.series[k].name}: ${shown(ys[i], this.about.y_unit)}`));
    const details = (page.hover || {})[this.about.x] || [];
    const more = details.map(([label, column]) => element("div", {}, `${label} ${shown(page.columns[column][i])}`));
    this.tip.replaceChildren(element("b", {}, shown(this.x[i], this.about.x_unit)), ...more, ...rows.filter(Boolean));
    this.tip.style.cssText = middle > width / 2 ? `right:${width - middle + 8}px` : `left:${middle + 8}px`;
    this.tip.hidden = false;
  }
}

function color(k) {
  const own = `var(--c${k % 8})`;
  return k < 8 ? own : `color-mix(in srgb, ${own} ${k < 16 ? 55 : 30}%, var(--ink))`;
}

// Everything else

const MAKERS = {
  chart(about) {
    const made = new Chart(about);
    charts.push(made);
    return made.root;
  },
  table({title, head, rows}) {
    const line = (tag, cells) => element("tr", {}, ...cells.map((one) => element(tag, {}, `${one ?? "–"}`)));
    const made = element("table", {}, line("th", head), ...rows.map((row) => line("td", row)));
    return element("section", {class: "wide"}, element("h2", {}, title), element("div", {class: "scrolls"}, made));
  },
  figures({items}) {
    const made = items.map(([value, label]) => element("div", {}, element("b", {}, value), element("span", {}, label)));
    return element("section", {class: "wide"}, element("div", {class: "figures"}, ...made));
  },
  text({title, text}) {
    return element("section", {class: "wide"}, element("h2", {}, title), element("p", {}, text));
  },
  code({title, text}) {
    return element("section", {class: "wide"}, element("h2", {}, title), element("pre", {}, text));
  },
};

function render() {
  charts = [];
  main.style.minHeight = `${main.offsetHeight}px`;  // the page does not jump while it is empty
  main.replaceChildren();
  main.append(...page.sections.map((one) => MAKERS[one.kind](one)));
  charts.forEach((one) => one.draw());
  main.style.minHeight = "";
}

render();
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) charts.forEach((one) => one.draw());
  drawnWidth = innerWidth;
});
