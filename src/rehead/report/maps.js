// Draws every figure.attention-maps of a page: the map of one layer and head, and an overview
// of all heads in which a click selects one. maps.py documents the data.
(() => {
  const TICKS = [0.01, 0.1, 0.25, 0.5, 1];
  const NUMBERS = 12, GAPS = 64; // up to this many tokens, cells show their weights, and have gaps between them
  const UNITS = { entropy: "nats", distance: "tokens" };

  async function unpack(base64) {
    const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function add(parent, name, attributes = {}, text = null) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return parent.appendChild(node);
  }

  // The page's colours for 0, 0.5 and 1, interpolated between.
  function shades(figure) {
    const style = getComputedStyle(figure);
    const [weak, middle, strong] = ["--weak", "--middle", "--strong"].map((name) => {
      const hex = style.getPropertyValue(name).trim();
      return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    });
    return (share) => {
      const [from, to, way] = share < 0.5 ? [weak, middle, 2 * share] : [middle, strong, 2 * share - 1];
      return from.map((value, i) => Math.round(value + (to[i] - value) * way));
    };
  }

  const css = (rgb) => `rgb(${rgb.join(" ")})`;
  const onto = ([red, green, blue]) => 0.3 * red + 0.6 * green + 0.1 * blue > 140 ? "#10151a" : "#ffffff";
  const weight = (cell) => (cell / 255) ** 2;

  function image(map, n, shade) {
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    canvas.width = canvas.height = n;
    const pixels = context.createImageData(n, n), table = Array.from({ length: 256 }, (_, cell) => shade(cell / 255));
    map.forEach((cell, at) => { if (cell) pixels.data.set([...table[cell], 255], 4 * at); });
    context.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  function drawMap(figure, data, map, about) {
    const n = data.tokens.length, svg = figure.querySelector(".map"), width = svg.clientWidth, shade = shades(figure);
    const longest = Math.max(4, Math.floor(width / 45)), most = Math.max(...data.tokens.map((token) => token.length));
    const margin = 10 + 7.5 * Math.min(longest, most), size = width - margin, cell = size / n;
    const every = Math.ceil(13 / cell);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${width}`);
    svg.setAttribute("aria-label", about);
    add(svg, "image", { href: image(map, n, shade), x: margin, y: margin, width: size, height: size, preserveAspectRatio: "none" });
    if (n <= GAPS) {
      const lines = data.tokens.map((_, i) => `M${margin + i * cell} ${margin}v${size}M${margin} ${margin + i * cell}h${size}`);
      add(svg, "path", { class: "gaps", d: lines.join("") });
    }
    data.tokens.forEach((token, i) => {
      if (i % every) return;
      const text = token.length > longest ? `${token.slice(0, longest - 1)}…` : token, at = margin + (i + 0.5) * cell;
      add(svg, "text", { class: "row", x: margin - 6, y: at + 4, "text-anchor": "end" }, text);
      add(svg, "text", { class: "column", transform: `translate(${at + 4} ${margin - 6}) rotate(-90)` }, text);
    });
    if (n <= NUMBERS) {
      map.forEach((value, at) => {
        const x = margin + (at % n + 0.5) * cell, y = margin + (Math.floor(at / n) + 0.5) * cell + 4;
        const ink = onto(shade(value / 255));
        if (value) add(svg, "text", { x, y, "text-anchor": "middle", style: `fill: ${ink}` }, weight(value).toFixed(2));
      });
    }
    const box = add(svg, "rect", { class: "chosen", width: cell, height: cell, visibility: "hidden" });
    svg.onpointermove = svg.onpointerdown = (event) => {
      const place = svg.getBoundingClientRect(), scale = width / place.width;
      const j = Math.floor(((event.clientX - place.left) * scale - margin) / cell);
      const i = Math.floor(((event.clientY - place.top) * scale - margin) / cell);
      const value = i >= 0 && j >= 0 && i < n && j < n ? map[i * n + j] : 0;
      box.setAttribute("visibility", value ? "visible" : "hidden");
      if (!value) return;
      box.setAttribute("x", margin + j * cell);
      box.setAttribute("y", margin + i * cell);
      figure.querySelector("output").textContent =
        `${weight(value).toPrecision(2)} of ${i} ${data.tokens[i]} goes to ${j} ${data.tokens[j]}`;
    };
  }

  // A gradient with labels at its ends, or at some positions.
  function drawScale(target, shade, title, marks) {
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => css(shade(share)));
    target.style.setProperty("--ramp", `linear-gradient(90deg, ${stops.join(", ")})`);
    target.replaceChildren(...marks.map(([share, text]) => {
      const mark = document.createElement("span");
      mark.textContent = text;
      mark.style.left = `${100 * share}%`;
      return mark;
    }));
    target.previousElementSibling.textContent = title;
  }

  function drawOverview(figure, data, kind, layer, head, choose) {
    const rows = data.layers.map((one) => one[kind]), all = rows.flat(), shade = shades(figure);
    const low = Math.min(...all), high = Math.max(...all);
    const body = figure.querySelector(".overview");
    body.replaceChildren(...rows.map((row, i) => {
      const line = document.createElement("tr"), name = line.appendChild(document.createElement("th"));
      name.textContent = i;
      name.scope = "row";
      row.forEach((value, j) => {
        const button = line.appendChild(document.createElement("td")).appendChild(document.createElement("button"));
        const colour = shade(high > low ? (value - low) / (high - low) : 0.5);
        button.type = "button";
        button.title = `layer ${i}, head ${j}: ${kind} ${value.toFixed(2)} ${UNITS[kind]}`;
        button.setAttribute("aria-label", button.title);
        button.setAttribute("aria-pressed", i === layer && j === head);
        button.style.background = css(colour);
        button.addEventListener("click", () => choose(i, j));
      });
      return line;
    }));
    drawScale(figure.querySelector(".of-heads"), shade, `${kind} (${UNITS[kind]})`, [[0, low.toFixed(2)], [1, high.toFixed(2)]]);
    drawScale(figure.querySelector(".of-map"), shade, "weight", TICKS.map((value) => [Math.sqrt(value), value]));
  }

  function fill(select, count, chosen) {
    select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(i, i, false, i === chosen)));
  }

  function sentence(window, n) {
    if (window === null) return "";
    return `In this layer a token sees only the last ${window} tokens${window < n ? "" : `; with ${n} tokens that hides nothing`}.`;
  }

  async function start(figure) {
    const data = JSON.parse(figure.dataset.about), n = data.tokens.length;
    const cells = await unpack(figure.dataset.weights);
    const [layers, heads, kinds] = ["layer", "head", "kind"].map((name) => figure.querySelector(`[name=${name}]`));
    const draw = (wanted) => {
      const layer = Number(layers.value), count = data.layers[layer].entropy.length, head = Math.min(wanted, count - 1);
      const before = data.layers.slice(0, layer).reduce((sum, one) => sum + one.entropy.length, 0) + head;
      fill(heads, count, head);
      figure.querySelector("output").textContent = "";
      figure.querySelector(".of-window").textContent = sentence(data.layers[layer].window, n);
      const about = `Attention weights of layer ${layer}, head ${head} over ${n} tokens`;
      drawMap(figure, data, cells.subarray(before * n * n, (before + 1) * n * n), about);
      drawOverview(figure, data, kinds.value, layer, head, (chosen, other) => {
        layers.value = chosen;
        fill(heads, data.layers[chosen].entropy.length, other);
        for (const choice of [layers, heads]) choice.dispatchEvent(new Event("change", { bubbles: true }));
        figure.querySelectorAll(".overview tr")[chosen].querySelectorAll("button")[other].focus({ preventScroll: true });
      });
    };
    const again = () => { if (figure.clientWidth) draw(Number(heads.value)); };
    for (const choice of [layers, heads, kinds]) choice.addEventListener("change", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    for (const kind of ["beforeprint", "afterprint"]) addEventListener(kind, again);
    layers.value = data.layer;
    fill(heads, data.layers[data.layer].entropy.length, data.head);
    let width = 0; // nothing is drawn while hidden, such as in a closed <details>
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      again();
    }).observe(figure);
  }

  addEventListener("DOMContentLoaded", () => document.querySelectorAll("figure.attention-maps").forEach(start));
})();
