"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const colour = i => css("--h" + (i % 8));
const number = v => v === null || v === undefined ? "-" : Math.abs(v) >= 1000 ? v.toLocaleString("en", {maximumFractionDigits: 0}) : String(Number(v.toPrecision(4)));
const drawn = new Map();

function dataset(series, chart) {
  const c = colour(series.colour), bar = series.style === "bar", curve = series.style === "curve";
  const points = series.points.map(p => bar ? p[1] : {x: p[0], y: p[1], text: p[2]});
  const base = {label: series.label, data: points, texts: series.points.map(p => p[2]), borderColor: c, backgroundColor: c, borderWidth: 2};
  if (bar) return {...base, data: chart.x_names.map(n => { const p = series.points.find(q => q[0] === n); return p ? p[1] : null; }),
    texts: chart.x_names.map(n => { const p = series.points.find(q => q[0] === n); return p ? p[2] : ""; }), maxBarThickness: 46, borderRadius: 3};
  const line = ["line", "dashed", "curve"].includes(series.style);
  return {...base, showLine: line, borderDash: series.style === "dashed" ? [7, 5] : [], pointRadius: curve ? 0 : series.points.length > 60 ? 0 : 4.5, pointHitRadius: 9,
    pointHoverRadius: 6, pointStyle: series.style === "cross" ? "crossRot" : "circle", pointBackgroundColor: series.style === "hollow" ? css("--card") : c,
    pointBorderWidth: 2, tension: 0};
}

const bands = {id: "bands", beforeDatasetsDraw(chart) {
  const marks = chart.config.options.marks || [], area = chart.chartArea, x = chart.scales.x, ctx = chart.ctx;
  for (const [low, high, label] of marks) {
    const a = x.getPixelForValue(low), b = x.getPixelForValue(high);
    ctx.save(); ctx.globalAlpha = .16; ctx.fillStyle = css("--warn"); ctx.fillRect(a, area.top, b - a, area.bottom - area.top);
    ctx.globalAlpha = 1; ctx.font = "600 11px system-ui"; ctx.textAlign = "center"; ctx.fillText("stops paying", (a + b) / 2, area.top + 12); ctx.restore();
  }
}};

function axis(title, log, grid) {
  return {type: log ? "logarithmic" : "linear", title: {display: !!title, text: title, color: css("--soft"), font: {size: 12}}, grid: {color: grid ? css("--line") : "transparent"},
    border: {color: css("--line")}, ticks: {color: css("--soft"), maxRotation: 0, autoSkipPadding: 14, callback: function (v) {
      if (log) { const m = v / Math.pow(10, Math.floor(Math.log10(v) + 1e-9)); const wide = this.max / this.min > 15;
        if (!(wide ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]).some(k => Math.abs(m - k) < 1e-6)) return null; }
      return number(v); }}};
}

function draw(figure) {
  const chart = data.charts.find(c => c.id === figure.dataset.chart);
  const variant = chart.variants[Number(figure.dataset.variant || 0)];
  const canvas = figure.querySelector("canvas"), bar = chart.x_names.length > 0;
  const old = drawn.get(figure); if (old) old.destroy();
  figure.querySelector(".note").textContent = variant.note;
  const x = axis(chart.x, chart.x_log, false);
  if (bar) { x.type = "category"; x.labels = chart.x_names; x.ticks = {color: css("--soft"), maxRotation: 0}; }
  else if (chart.x_log && chart.id === "concurrency") {
    const users = new Set(variant.series.flatMap(s => s.points.map(p => p[0])));
    x.afterBuildTicks = a => { a.ticks = [...users].sort((p, q) => p - q).filter(v => v >= a.min && v <= a.max).map(value => ({value})); };
    x.ticks.callback = v => number(v);
  }
  const y = {...axis(chart.y, chart.y_log, true), beginAtZero: !chart.y_log, grace: chart.y === "% of requests" ? 0 : "5%"};
  if (chart.y === "% of requests" || chart.y === "%") { y.min = 0; y.max = 100; }
  drawn.set(figure, new Chart(canvas, {type: bar ? "bar" : "scatter", data: {labels: bar ? chart.x_names : undefined, datasets: variant.series.map(s => dataset(s, chart))},
    plugins: [bands], options: {marks: variant.marks, responsive: true, maintainAspectRatio: false, animation: false, scales: {x, y},
    interaction: {mode: "nearest", intersect: false, axis: "xy"},
    plugins: {legend: {display: variant.series.length > 0, position: "bottom", labels: {color: css("--ink"), boxWidth: 14, boxHeight: 2, font: {size: 12}}},
      tooltip: {displayColors: false, callbacks: {title: items => items[0].dataset.label, label: item => {
        const text = item.dataset.texts[item.dataIndex] || `${chart.source}`;
        const at = bar ? `${number(item.raw)} ${chart.y}` : `${number(item.parsed.x)} ${chart.x.split(",")[0]} : ${number(item.parsed.y)} ${chart.y}`;
        return [at, ...text.split(" | ")]; }}},
      zoom: bar ? {} : {zoom: {drag: {enabled: matchMedia("(pointer: fine)").matches, backgroundColor: "rgba(120,140,160,.2)"}, pinch: {enabled: true}, mode: "xy"},
        pan: {enabled: true, mode: "xy", modifierKey: "shift"}}}}}));
  figure.dataset.drawn = "true";
}

function drawAll() { document.querySelectorAll("figure[data-chart]").forEach(f => { if (f.dataset.seen) draw(f); }); }
const watcher = new IntersectionObserver(entries => { for (const e of entries) if (e.isIntersecting && !e.target.dataset.seen) { e.target.dataset.seen = "1"; draw(e.target); } },
  {rootMargin: "600px"});
document.querySelectorAll("figure[data-chart]").forEach(f => watcher.observe(f));
addEventListener("beforeprint", () => document.querySelectorAll("figure[data-chart]").forEach(f => { f.dataset.seen = "1"; draw(f); }));

document.addEventListener("click", event => {
  const button = event.target.closest("button"); if (!button) return;
  const figure = button.closest("figure");
  if (button.dataset.variant !== undefined) {
    figure.dataset.variant = button.dataset.variant;
    figure.querySelectorAll("button[data-variant]").forEach(b => b.setAttribute("aria-pressed", String(b === button)));
    draw(figure);
  } else if (button.dataset.reset !== undefined) drawn.get(figure).resetZoom();
  else if (button.id === "theme") {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark"; drawAll();
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

const tip = document.getElementById("tip");
function show(event) {
  const v = event.target.closest && event.target.closest("[data-s]"); if (!v) { tip.hidden = true; return; }
  tip.textContent = data.sources[Number(v.dataset.s)]; tip.hidden = false;
  const box = v.getBoundingClientRect(), size = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(box.left, innerWidth - size.width - 6)) + "px";
  tip.style.top = (box.bottom + size.height + 8 < innerHeight ? box.bottom + 6 : Math.max(6, box.top - size.height - 6)) + "px";
}
for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, show);
addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
addEventListener("keydown", e => { if (e.key === "Escape") tip.hidden = true; });
})();
