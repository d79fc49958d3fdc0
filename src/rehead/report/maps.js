// Draws every figure.attention-maps of a page: the map of one layer and head, and an overview
// of all heads in which a click chooses one. Needs Plotly. What the data are is said in maps.py.
(() => {
  const SCALES = {
    light: [[0, "#eef3f9"], [0.5, "#4e95c9"], [1, "#08284f"]],
    dark: [[0, "#1c2733"], [0.5, "#3a83b8"], [1, "#eaf6ff"]],
  };
  const TICKS = [0.01, 0.1, 0.25, 0.5, 1];
  const UNITS = { entropy: "entropy (nats)", distance: "distance (tokens)" };
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  async function unpack(base64) {
    const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function look(figure) {
    const ink = getComputedStyle(figure).color;
    const [red, green, blue] = ink.match(/[\d.]+/g).map(Number);
    const scale = red + green + blue > 384 ? SCALES.dark : SCALES.light;
    const axis = { showgrid: false, zeroline: false, ticks: "", fixedrange: true, automargin: true };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      margin: { l: 10, r: 10, t: 10, b: 10 },
    };
    const bar = { orientation: "h", y: 0, yanchor: "top", ypad: 14, thickness: 12, len: 0.6, outlinewidth: 0 };
    return { scale, axis, bar, layout };
  }

  function drawMap(figure, data, cells, layer, head) {
    const n = data.tokens.length, tokens = data.tokens.map(escaped);
    const before = data.layers.slice(0, layer).reduce((sum, one) => sum + one.entropy.length, 0);
    const map = cells.subarray((before + head) * n * n, (before + head + 1) * n * n);
    const rows = tokens.map((_, i) => Array.from(map.subarray(i * n, (i + 1) * n), (cell) => cell || null));
    const hover = rows.map((row, i) => row.map((cell, j) => cell === null ? "" :
      `<b>${((cell / 255) ** 2).toPrecision(2)}</b><br>of ${i} ${tokens[i]}<br>goes to ${j} ${tokens[j]}`));
    const numbers = rows.map((row) => row.map((cell) => cell === null ? "" : ((cell / 255) ** 2).toFixed(2)));
    const { scale, axis, bar, layout } = look(figure);
    const target = figure.querySelector(".map"), width = target.clientWidth;
    const step = Math.ceil((13 * n) / (0.75 * width)), longest = Math.ceil(width / 30);
    const places = tokens.map((_, i) => i).filter((i) => i % step === 0);
    const short = (text) => text.length > longest ? `${text.slice(0, longest - 1)}…` : text;
    const labelled = { ...axis, tickvals: places, ticktext: places.map((i) => escaped(short(data.tokens[i]))) };
    const trace = {
      type: "heatmap", z: rows, customdata: hover, hovertemplate: "%{customdata}<extra></extra>",
      text: numbers, texttemplate: n > 12 ? "" : "%{text}",
      zmin: 0, zmax: 255, colorscale: scale, xgap: n > 64 ? 0 : 1, ygap: n > 64 ? 0 : 1,
      colorbar: {
        ...bar, title: { text: "weight", side: "bottom" },
        tickvals: TICKS.map((weight) => 255 * Math.sqrt(weight)), ticktext: TICKS.map(String),
      },
    };
    Plotly.react(target, [trace], {
      ...layout,
      xaxis: { ...labelled, side: "top", tickangle: -90, constrain: "domain", range: [-0.5, n - 0.5] },
      yaxis: { ...labelled, range: [n - 0.5, -0.5], scaleanchor: "x", constrain: "domain" },
    }, { displayModeBar: false });
  }

  function drawOverview(figure, data, kind, choose) {
    const { scale, axis, bar, layout } = look(figure);
    const target = figure.querySelector(".overview");
    const rows = data.layers.map((layer) => layer[kind]);
    target.style.height = `${Math.min(150 + 30 * rows.length, 500)}px`;
    const most = Math.max(...rows.map((row) => row.length));
    const trace = {
      type: "heatmap", z: rows, colorscale: scale, xgap: 1, ygap: 1,
      hovertemplate: `layer %{y}, head %{x}<br>${kind} %{z:.2f}<extra></extra>`,
      colorbar: { ...bar, title: { text: UNITS[kind], side: "bottom" } },
    };
    const whole = { ...axis, dtick: Math.ceil(Math.max(most, rows.length) / 24) };
    Plotly.react(target, [trace], {
      ...layout,
      xaxis: { ...whole, side: "top", title: { text: "head" } },
      yaxis: { ...whole, title: { text: "layer" }, range: [rows.length - 0.5, -0.5] },
    }, { displayModeBar: false });
    target.removeAllListeners("plotly_click");
    target.on("plotly_click", ({ points }) => choose(points[0].y, points[0].x));
  }

  async function start(figure) {
    const data = JSON.parse(figure.dataset.about);
    const cells = await unpack(figure.dataset.weights);
    const [layers, heads, kinds] = ["layer", "head", "kind"].map((name) => figure.querySelector(`[name=${name}]`));
    const draw = (wanted) => {
      const count = data.layers[layers.value].entropy.length, head = Math.min(wanted, count - 1);
      heads.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(i, i, false, i === head)));
      drawMap(figure, data, cells, Number(layers.value), head);
      drawOverview(figure, data, kinds.value, (layer, chosen) => {
        layers.value = layer;
        draw(chosen);
      });
    };
    const again = () => draw(Number(heads.value));
    for (const choice of [layers, heads, kinds]) choice.addEventListener("change", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    layers.value = data.layer;
    heads.append(new Option(data.head, data.head));
    let width = 0; // nothing is drawn where nothing is seen, such as in a closed <details>
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      again();
      for (const chart of figure.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(chart);
    }).observe(figure);
  }

  addEventListener("DOMContentLoaded", () => document.querySelectorAll("figure.attention-maps").forEach(start));
})();
