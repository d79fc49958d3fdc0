// Draws every figure.chart with data as SVG at its width: lines or points, a legend whose entries can be switched off,
// and the values under the pointer or, with the arrow keys, of one position after another. interactive.py documents the
// data; colours come from the page.
(() => {
  const HEIGHT = 330, TOP = 26, BOTTOM = 44, RIGHT = 14, NEAR = 40;
  const DASHES = { solid: "none", dash: "7 4", dashdot: "8 3 2 3", dot: "3 3" };
  const MARKS = {
    circle: "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0-5 0Z", diamond: "M0-6.5L6.5 0L0 6.5L-6.5 0Z",
    star: "M0-8L2 -2.6L7.6-2.5L3.2 1L4.7 6.5L0 3.3L-4.7 6.5L-3.2 1L-7.6-2.5L-2-2.6Z",
    square: "M-5-5H5V5H-5Z", triangle: "M0-6.5L6.5 5H-6.5Z", down: "M0 6.5L6.5-5H-6.5Z",
    left: "M-6.5 0L5-6.5V6.5Z", right: "M6.5 0L-5-6.5V6.5Z", plus: "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
    cross: "M-6-3.2L-3.2-6L0-2.8L3.2-6L6-3.2L2.8 0L6 3.2L3.2 6L0 2.8L-3.2 6L-6 3.2L-2.8 0Z",
  };
  // The four marks of a colour: filled, hollow, hollow around a core, and filled in a ring.
  const RINGS = {
    solid: [[1, "mark"]], dash: [[1, "mark open"]], dashdot: [[1, "mark open"], [0.35, "mark"]],
    dot: [[1.3, "mark open"], [0.5, "mark"]],
  };
  const DOTS = { solid: "2 3", dash: "2 7", dashdot: "2 3 2 8", dot: "2 3 2 3 2 8" };

  function add(parent, name, attributes = {}, text = null) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return parent.appendChild(node);
  }

  function put(parent, name, text = null, className = "") {
    const node = document.createElement(name);
    node.textContent = text;
    if (className) node.className = className;
    return parent.appendChild(node);
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return Array.from({ length: last - first + 1 }, (_, i) => {
      const value = (first + i) * step;
      return { value, text: value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) };
    });
  }

  // Powers of two or, where fewer than two fit, the values themselves that are far enough apart.
  function powers(low, high, count, values) {
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9), every = Math.ceil((last - first + 1) / count);
    let found = [];
    for (let power = first; power <= last; power += every) found.push(power);
    if (found.length < 2) {
      found = [];
      for (const value of [...values].sort((a, b) => a - b)) {
        if (!found.length || value - found.at(-1) >= (high - low) / count) found.push(value);
      }
    }
    return found.map((value) => ({ value, text: (2 ** value).toLocaleString("en", { maximumFractionDigits: 0 }) }));
  }

  function range(values, pad) {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low) * pad || Math.abs(high) * 0.05 || 1;
    return pad || low === high ? [low - room, high + room] : [low, high];
  }

  const exact = (value) => Math.abs(value) >= 1000 || Number.isInteger(value)
    ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : value.toPrecision(5).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

  function icon(parent, one, kind) {
    const svg = add(parent, "svg", { viewBox: "0 0 22 14", class: `c${one.slot}`, "aria-hidden": "true" });
    if (kind === "lines" || one.joined) add(svg, "path", { class: "line", d: "M0 7H22", "stroke-dasharray": DASHES[one.dash] });
    else mark(svg, one, 11, 7);
  }

  function mark(parent, one, x, y, i = 0) {
    const d = MARKS[one.markers[i] ?? one.marker];
    for (const [size, kind] of RINGS[one.dash]) {
      add(parent, "path", { class: kind, d, transform: `translate(${x} ${y}) scale(${size})` });
    }
  }

  function path(xs, ys) {
    let pen = "M";
    return xs.map((x, i) => {
      if (x === null || ys[i] === null || Number.isNaN(ys[i])) { pen = "M"; return ""; }
      const piece = `${pen}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
      pen = "L";
      return piece;
    }).join("");
  }

  function draw(figure, data, hidden) {
    const { kind, logX } = data, shown = data.series.filter((one) => !hidden.has(one.name) && one.x.length);
    const svg = figure.querySelector(".plot"), width = figure.clientWidth;
    const place = logX ? Math.log2 : Number, real = (values) => values.filter((value) => value !== null);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const xs = real(shown.flatMap((one) => one.x)).map(place);
    const ys = real(shown.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])]));
    if (!xs.length || !ys.length) {
      add(svg, "text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing selected");
      return [];
    }
    const [left, right] = range(xs, logX ? 0.08 : kind === "points" ? 0.05 : 0), [low, high] = range(ys, 0.06);
    const rows = ticks(low, high, 6), margin = 14 + 7 * Math.max(...rows.map((one) => one.text.length));
    const scaleX = (value) => margin + (place(value) - left) / (right - left) * (width - margin - RIGHT);
    const scaleY = (value) => value === null ? null : TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
    const floor = HEIGHT - BOTTOM;

    add(svg, "text", { x: 0, y: 12 }, data.y);
    for (const { value, text } of rows) {
      const y = scaleY(value);
      add(svg, "path", { class: "grid", d: `M${margin} ${y}H${width - RIGHT}` });
      add(svg, "text", { x: margin - 8, y: y + 4, "text-anchor": "end" }, text);
    }
    const columns = (logX ? powers : ticks)(left, right, Math.max(2, Math.floor(width / 90)), xs);
    for (const { value, text } of columns) {
      const x = scaleX(logX ? 2 ** value : value);
      add(svg, "path", { class: "axis", d: `M${x} ${floor}v5` });
      add(svg, "text", { x, y: floor + 18, "text-anchor": "middle" }, text);
    }
    add(svg, "path", { class: "axis", d: `M${margin} ${floor}H${width - RIGHT}` });
    add(svg, "text", { x: (margin + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, data.x);

    for (const one of [...shown].sort((a, b) => b.faint - a.faint)) {
      const group = add(svg, "g", { class: `series c${one.slot}` }), x = one.x.map(scaleX), y = one.y.map(scaleY);
      if (kind === "lines" && one.low) {
        const edge = [...one.high.map(scaleY), ...one.low.map(scaleY).reverse()];
        add(group, "path", { class: "band", d: `${path([...x, ...[...x].reverse()], edge)}Z` });
      }
      if (kind === "lines" || one.faint) {
        const dash = (one.faint ? DOTS : DASHES)[one.dash];
        add(group, "path", { class: one.faint ? "line faint" : "line", d: path(x, y), "stroke-dasharray": dash });
        if (x.length === 1 && y[0] !== null) mark(group, one, x[0], y[0]);
        continue;
      }
      if (one.joined) add(group, "path", { class: "line joined", d: path(x, y), "stroke-dasharray": DASHES[one.dash] });
      x.forEach((at, i) => {
        if (one.low) add(group, "path", { class: "whisker", d: `M${at} ${scaleY(one.low[i])}V${scaleY(one.high[i])}` });
        if (y[i] !== null) mark(group, one, at, y[i], i);
      });
    }
    if (data.named) names(svg, shown.filter((one) => !one.faint), scaleX, scaleY, width);
    return stops(data, shown).map((stop) => ({ ...stop, left: scaleX(stop.x), top: scaleY(stop.y) }));
  }

  const named = (one, i) => one.labels.length ? one.labels[i] : one.name;

  // The name beside every point, each once, moved up or down or to its other side where another name is, or a mark.
  function names(svg, series, scaleX, scaleY, width) {
    const above = series.some((one) => one.joined), moves = above ? [-14, 0, 14, -28, 28, -42] : [0, 14, -14, 28, -28, -42];
    const taken = [], marks = [], lowest = HEIGHT - BOTTOM - 2, points = new Map();
    for (const one of series) {
      one.y.forEach((y, i) => { if (y !== null && !points.has(named(one, i))) points.set(named(one, i), [one.x[i], y]); });
    }
    for (const one of series) {
      one.y.forEach((y, i) => { if (y !== null) marks.push({ from: scaleX(one.x[i]) - 7, wide: 14, y: scaleY(y) + 4 }); });
    }
    for (const [name, [valueX, valueY]] of [...points].sort(([, a], [, b]) => b[1] - a[1])) {
      const x = scaleX(valueX), first = above || x < width / 2, wide = 7 * name.length;
      const places = [first, !first].flatMap((right) => moves.map((down) => (
        { right, wide, from: right ? x + 12 : x - 12 - wide, y: Math.min(scaleY(valueY) + 4, lowest) + down }
      )));
      const meets = (a, b) => Math.abs(a.y - b.y) < 14 && a.from < b.from + b.wide && b.from < a.from + a.wide;
      const open = places.filter((place) => place.y <= lowest && place.y >= TOP && place.from >= 0 && place.from + wide + 6 <= width
        && !taken.some((other) => meets(place, other)));
      const free = open.find((place) => !marks.some((other) => meets(place, other))) ?? open[0];
      if (!free) continue;
      taken.push(free);
      const anchor = free.right ? "start" : "end";
      add(svg, "text", { x: free.right ? x + 12 : x - 12, y: free.y, "text-anchor": anchor, class: "name" }, name);
    }
  }

  // Stops of the pointer: each step, with the values of all lines there, or each point.
  function stops(data, shown) {
    const said = (one, i) => exact(one.y[i]) + (one.low ? ` (${exact(one.low[i])} to ${exact(one.high[i])})` : "");
    if (data.kind === "points") {
      return shown.filter((one) => !one.faint).flatMap((one) => one.x.map((x, i) => (
        { x, y: one.y[i], head: one.labels.length ? `${one.labels[i]}, ${one.name}` : one.name, rows: [[data.x, exact(x)], [data.y, said(one, i)]] }
      ))).filter((stop) => stop.y !== null).sort((a, b) => a.x - b.x);
    }
    const steps = [...new Set(shown.flatMap((one) => one.x))].sort((a, b) => a - b);
    return steps.map((x) => {
      const there = shown.map((one) => [one, one.x.indexOf(x)]).filter(([one, i]) => i >= 0 && one.y[i] !== null)
        .sort(([one, i], [other, j]) => one.faint - other.faint || other.y[j] - one.y[i]);
      const rows = there.map(([one, i]) => [one.faint ? `${one.name} (dotted)` : one.name, said(one, i)]);
      return { x, y: there.length ? there[0][0].y[there[0][1]] : null, head: `${exact(x)} ${data.x}`, rows };
    }).filter((stop) => stop.rows.length);
  }

  function point(figure, stop, kind) {
    const svg = figure.querySelector(".plot"), tip = figure.querySelector(".tip");
    svg.querySelector(".cursor")?.remove();
    tip.hidden = !stop;
    if (!stop) return;
    tip.replaceChildren();
    put(tip, "b", stop.head);
    const table = put(tip, "table");
    for (const row of stop.rows) {
      const line = put(table, "tr");
      for (const cell of row) put(line, "td", cell);
    }
    if (kind === "lines") add(svg, "path", { class: "cursor", d: `M${stop.left} ${TOP}V${HEIGHT - BOTTOM}` });
    const beside = stop.left + 14 + tip.offsetWidth < figure.clientWidth;
    tip.style.left = `${beside ? stop.left + 14 : Math.max(0, stop.left - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + TOP}px`;
  }

  function start(figure) {
    const data = JSON.parse(figure.dataset.chart), hidden = new Set();
    const legend = put(figure, "ul", null, "legend");
    const svg = add(figure, "svg", { class: "plot", role: "img", "aria-label": data.label, tabindex: 0, height: HEIGHT });
    put(figure, "div", null, "tip").hidden = true;
    let places = [], chosen = -1, width = 0;
    const choose = (index) => { chosen = index; point(figure, places[index], data.kind); };
    const again = () => { places = draw(figure, data, hidden); choose(-1); };
    for (const one of data.series.filter((series) => !series.faint)) {
      const button = put(put(legend, "li"), "button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      icon(button, one, data.kind);
      put(button, "span", one.name);
      button.addEventListener("click", () => {
        if (!hidden.delete(one.name)) hidden.add(one.name);
        button.setAttribute("aria-pressed", !hidden.has(one.name));
        again();
      });
    }
    const near = (event) => {
      const box = svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      const away = places.map((stop) => Math.hypot(stop.left - x, data.kind === "lines" ? 0 : stop.top - y));
      const best = away.indexOf(Math.min(...away));
      choose(data.kind === "lines" || away[best] < NEAR ? best : -1);
    };
    for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, near);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") choose(-1); }); // a finger leaves as it lifts
    svg.addEventListener("blur", () => choose(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !places.length) return;
      event.preventDefault();
      choose(chosen < 0 ? (step > 0 ? 0 : places.length - 1) : Math.min(Math.max(chosen + step, 0), places.length - 1));
    });
    new ResizeObserver(() => { // nothing is drawn while hidden, such as in a closed <details>
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      again();
    }).observe(figure);
  }

  addEventListener("DOMContentLoaded", () => document.querySelectorAll("figure.chart[data-chart]").forEach(start));
})();
