// Draws the charts of a study's page in the colours of its theme, and lets one variant's maps be chosen.
(() => {
  const DARKER = { "#000000": "#f2f2f2", "#0072B2": "#2a93d5" }; // in the dark, what would not be seen
  const dark = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
  const page = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw(chart) {
    let text = chart.dataset.figure;
    if (dark.matches && !paper.matches) {
      for (const [colour, shown] of Object.entries(DARKER)) text = text.replaceAll(colour, shown);
    }
    const { data, layout } = JSON.parse(text), narrow = chart.clientWidth < 520;
    const axis = { gridcolor: page("--grid"), zerolinecolor: page("--line"), linecolor: page("--line") };
    Plotly.react(chart, data, {
      ...layout,
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: page("--ink"), size: narrow ? 11 : 13, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: page("--card"), font: { color: page("--ink") } },
    }, { displaylogo: false, responsive: true, displayModeBar: false });
  }

  addEventListener("DOMContentLoaded", () => {
    const all = () => document.querySelectorAll(".chart").forEach(draw);
    all();
    dark.addEventListener("change", all);
    addEventListener("beforeprint", all);
    addEventListener("afterprint", all);
    const chosen = document.querySelector("#maps > p select");
    chosen?.addEventListener("change", () => {
      document.querySelectorAll("#maps .one").forEach((one, index) => one.classList.toggle("shown", index === Number(chosen.value)));
    });
  });
})();
