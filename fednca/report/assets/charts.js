"use strict";
// Charts as SVG text. Colours are CSS variables, so that light, dark and print need no redrawing.

const esc = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const colour = (i) => (i < 0 ? "var(--other)" : `var(--c${i % 10})`);
const dash = (i) => (i >= 20 ? "2 3" : i >= 10 ? "7 4" : "none");
const percent = (v) => (v == null ? "–" : (100 * v).toFixed(1));
const wholePercent = (v) => String(+(100 * v).toPrecision(6));
const number = (v) => (v == null ? "–" : v !== 0 && (Math.abs(v) < 0.001 || Math.abs(v) >= 1e5) ? v.toExponential(2) : String(+v.toPrecision(4)));
const textWidth = (names) => 6.7 * Math.max(0, ...names.map((name) => name.length));

/** A new element with attributes (`onclick` listens) and children. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    key.startsWith("on") ? element.addEventListener(key.slice(2), value) : element.setAttribute(key, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const SHAPES = ["M-1-1H1V1H-1Z", "M0-1.3L1.3 0L0 1.3L-1.3 0Z", "M0-1.2L1.2 1H-1.2Z", "M0 1.2L1.2-1H-1.2Z", "M-1.2 0H1.2M0-1.2V1.2", "M-1-1L1 1M1-1L-1 1"];

/** The mark of number i: no two share colour and shape, so a chart can be read without seeing colours. */
function mark(i, x, y, r, tip = "") {
  const attributes = tip && ` data-tip="${esc(tip)}"`;
  const shape = Math.floor(i / 10) + (i % 10);
  if (i < 0 || shape % 7 === 0) return `<circle cx="${x}" cy="${y}" r="${r}" fill="${colour(i)}"${attributes}/>`;
  const outlined = shape % 7 >= 5 ? `stroke="${colour(i)}" stroke-width=".7"` : "";
  return `<path d="${SHAPES[(shape % 7) - 1]}" transform="translate(${x} ${y}) scale(${r})" fill="${colour(i)}" ${outlined}${attributes}/>`;
}
const swatch = (i) => `<svg class="swatch" viewBox="-6 -6 12 12" style="width:12px">${mark(i, 0, 0, 4.5)}</svg>`;
const hatch = (box) => `<rect ${box} fill="url(#hatch)" pointer-events="none"/>`;
const boxSwatch = (i) => `<svg class="swatch" viewBox="0 0 12 12" style="width:12px"><rect width="12" height="12" fill="${colour(i)}"/>${i >= 10 ? hatch('width="12" height="12"') : ""}</svg>`;

function html(text) {
  const holder = document.createElement("template");
  holder.innerHTML = text;
  return holder.content;
}

/** The text of a tooltip; lines: [number of the mark or null, name, value]. */
const tip = (head, lines = []) => JSON.stringify([head, lines]);

document.addEventListener("mousemove", (event) => {
  const box = document.getElementById("tip");
  const source = event.target.closest?.("[data-tip]");
  box.hidden = !source;
  if (!source) return;
  const [head, lines] = JSON.parse(source.getAttribute("data-tip"));
  const rows = lines.map(([i, name, value]) => `<div>${i == null ? "" : swatch(i)}<span>${esc(name)}</span><span>${esc(value)}</span></div>`);
  box.innerHTML = `<b>${esc(head)}</b>${rows.join("")}`;
  box.style.left = `${event.clientX + 16 + box.offsetWidth > innerWidth ? Math.max(4, event.clientX - 14 - box.offsetWidth) : event.clientX + 16}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 4))}px`;
});

/** About `count` round numbers from low to high. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999));
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9); v * step <= high + step * 1e-6; v++) found.push(+(v * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 6));
  const found = [];
  for (let p = from; p <= to; p++)
    for (const m of to - from <= 2 ? [1, 2, 5] : [1]) if ((p - from) % every === 0) found.push(m * 10 ** p);
  return found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
}

function svg(host, width, height, content, label) {
  host.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${esc(label)}">${content}</svg>`;
}

/** Lines with bands. series: {i, name, x, mean, low, high}, coloured by i; `show` writes a value. */
function lineChart(host, series, { xlabel, label, log = false, height = 260, show = number, showTick = show, whole = true, thin = false }) {
  const width = Math.max(280, host.clientWidth || 560);
  series = series.filter((s) => s.x.length);
  if (!series.length) return void (host.innerHTML = '<p class="quiet small">nothing to show yet</p>');
  const usable = (v) => v != null && (!log || v > 0);
  const all = series.flatMap((s) => [...(s.low ?? s.mean), ...(s.high ?? s.mean)]).filter(usable);
  const xs = series.flatMap((s) => s.x);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...all), Math.max(...all)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (log) [y0, y1] = y0 === y1 ? [y0 / 2, y1 * 2] : [y0 / 1.15, y1 * 1.15];
  else {
    const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - pad) : y0 - pad, y1 + pad];
  }
  const yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, 5);
  const left = 14 + textWidth(yTicks.map(showTick)), right = width - 8, top = 10, bottom = height - 38;
  const x = (v) => left + ((v - x0) / (x1 - x0)) * (right - left);
  const f = log ? Math.log : (v) => v;
  const y = (v) => bottom - ((f(v) - f(y0)) / (f(y1) - f(y0))) * (bottom - top);
  const parts = yTicks.map((v) => `<line class="grid-line" x1="${left}" x2="${right}" y1="${y(v)}" y2="${y(v)}"/><text x="${left - 6}" y="${y(v) + 4}" text-anchor="end">${showTick(v)}</text>`);
  parts.push(...ticks(x0, x1, width / 90, whole).map((v) => `<text x="${x(v)}" y="${bottom + 17}" text-anchor="middle">${number(v)}</text>`));
  parts.push(`<line class="axis" x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/><text x="${(left + right) / 2}" y="${height - 4}" text-anchor="middle">${esc(xlabel)}</text>`);
  for (const s of series) {
    const points = s.x.map((v, n) => [x(v), n]).filter(([, n]) => usable(s.mean[n]));
    if (s.low && s.low.some((v, n) => v !== s.high[n])) {
      const edge = [...points.map(([at, n]) => `${at},${y(s.high[n])}`), ...points.reverse().map(([at, n]) => `${at},${y(usable(s.low[n]) ? s.low[n] : y0)}`)];
      points.reverse();
      parts.push(`<polygon points="${edge.join(" ")}" fill="${colour(s.i)}" opacity=".18"/>`);
    }
    const line = points.map(([at, n]) => `${at.toFixed(1)},${y(s.mean[n]).toFixed(1)}`);
    parts.push(`<polyline data-series="${s.i}" points="${line.join(" ")}" fill="none" stroke="${colour(s.i)}" stroke-width="${thin ? 1 : 2}" opacity="${thin ? 0.6 : 1}" stroke-linejoin="round" stroke-dasharray="${dash(s.i)}"/>`);
    if (points.length && !thin) parts.push(mark(s.i, points.at(-1)[0].toFixed(1), y(s.mean[points.at(-1)[1]]).toFixed(1), 3.5));
  }
  const stops = [...new Set(xs)].sort((a, b) => a - b);
  const every = Math.ceil(stops.length / 250);
  stops.filter((_, n) => n % every === 0 || n === stops.length - 1).forEach((v, n, kept) => {
    const from = n ? (x(kept[n - 1]) + x(v)) / 2 : left, to = n < kept.length - 1 ? (x(v) + x(kept[n + 1])) / 2 : right;
    const lines = series.map((s) => [s, s.x.indexOf(v)]).filter(([, at]) => at >= 0).map(([s, at]) => {
      const range = s.low && s.low[at] !== s.high[at] ? ` (${show(s.low[at])} to ${show(s.high[at])})` : "";
      return [s.i, s.name, show(s.mean[at]) + range];
    });
    parts.push(`<g class="hit" data-tip="${esc(tip(`${xlabel} ${number(v)}`, lines.slice(0, 24)))}"><rect x="${from}" y="${top}" width="${to - from}" height="${bottom - top}"/><line x1="${x(v)}" x2="${x(v)}" y1="${top}" y2="${bottom}"/></g>`);
  });
  svg(host, width, height, parts.join(""), label);
}

/** A row for each class: a bar for how often it occurs, and a mark for each method at its value. */
function dotPlot(host, rows, { counted, xlabel, label }) {
  const width = Math.max(320, host.clientWidth || 1100), step = rows.length > 40 ? 16 : 24;
  const names = textWidth(rows.map((row) => row.name)) + 8, bars = counted ? 120 : 0, left = names + bars + 20, right = width - 12;
  const top = 26, bottom = top + rows.length * step, most = Math.max(1, ...rows.map((row) => row.count ?? 0));
  const x = (v) => left + v * (right - left);
  const parts = ticks(0, 1, width / 110).map((v) => `<line class="grid-line" x1="${x(v)}" x2="${x(v)}" y1="${top}" y2="${bottom}"/><text x="${x(v)}" y="${bottom + 16}" text-anchor="middle">${100 * v}</text>`);
  parts.push(`<text x="${(left + right) / 2}" y="${bottom + 34}" text-anchor="middle">${esc(xlabel)}</text>`);
  if (counted) parts.push(`<text x="${names}" y="14">${esc(counted)}</text>`);
  rows.forEach((row, n) => {
    const y = top + (n + 0.5) * step, long = ((row.count ?? 0) / most) * 70;
    parts.push(`<line class="grid-line" x1="${left}" x2="${right}" y1="${y}" y2="${y}"/><text class="name" x="${names - 8}" y="${y + 4}" text-anchor="end">${esc(row.name)}</text>`);
    if (counted) parts.push(`<rect x="${names}" y="${y - step * 0.3}" width="${long}" height="${step * 0.6}" fill="var(--other)"/><text x="${names + long + 4}" y="${y + 4}">${row.count}</text>`);
    const lines = row.points.map((p) => [p.i, p.name, percent(p.value?.mean)]);
    for (const p of row.points.filter((p) => p.value && p.value.low !== p.value.high))
      parts.push(`<line x1="${x(p.value.low)}" x2="${x(p.value.high)}" y1="${y}" y2="${y}" stroke="${colour(p.i)}" stroke-width="3" opacity=".45"/>`);
    parts.push(`<g class="hit" data-tip="${esc(tip(row.name, lines))}"><rect x="0" y="${y - step / 2}" width="${width}" height="${step}"/></g>`);
    for (const p of row.points.filter((p) => p.value)) parts.push(mark(p.i, x(p.value.mean).toFixed(1), y, 4.5, tip(row.name, lines)));
  });
  svg(host, width, bottom + 40, parts.join(""), label);
}

/** A bar for each client with a coloured segment for each class; from the eleventh class on segments are hatched. */
function stackedBars(host, clients, names, signs, counts, label) {
  const width = Math.max(300, host.clientWidth || 560), step = Math.max(9, Math.min(24, 560 / clients.length));
  const left = textWidth(clients) + 12, right = width - 50, bottom = clients.length * step;
  const total = (row) => row.reduce((a, b) => a + b, 0), most = Math.max(1, ...counts.map(total));
  const x = (v) => left + (v / most) * (right - left);
  const parts = [`<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="6" fill="var(--paper)" opacity=".75"/></pattern></defs>`];
  parts.push(...ticks(0, most, width / 110, true).map((v) => `<line class="grid-line" x1="${x(v)}" x2="${x(v)}" y1="0" y2="${bottom}"/><text x="${x(v)}" y="${bottom + 16}" text-anchor="middle">${v}</text>`));
  counts.forEach((row, k) => {
    let sum = 0;
    const y = k * step + step * 0.1;
    if (step >= 12 || k % 2 === 0) parts.push(`<text class="name" x="${left - 6}" y="${y + step * 0.4 + 4}" text-anchor="end">${esc(clients[k])}</text>`);
    row.forEach((n, c) => {
      if (!n) return;
      const box = `x="${x(sum)}" y="${y}" width="${x(sum + n) - x(sum)}" height="${step * 0.8}"`;
      parts.push(`<rect ${box} fill="${colour(signs[c])}" stroke="var(--paper)" stroke-width=".5" data-tip="${esc(tip(`client ${clients[k]}`, [[null, names[c], n]]))}"/>`);
      if (signs[c] >= 10) parts.push(hatch(box));
      sum += n;
    });
    if (step >= 12) parts.push(`<text x="${x(sum) + 5}" y="${y + step * 0.4 + 4}">${sum}</text>`);
  });
  parts.push(`<text x="${(left + right) / 2}" y="${bottom + 34}" text-anchor="middle">labels (one image may have several)</text>`);
  svg(host, width, bottom + 38, parts.join(""), label);
}

/** A bubble for each client and class, its area the number of images; a dot for an allowed class without images. */
function bubbleChart(host, clients, classes, counts, allowed, label) {
  const width = Math.max(300, host.clientWidth || 560), left = textWidth(clients) + 14;
  const step = Math.min(46, (width - left - 10) / classes.length), row = Math.max(10, Math.min(step, 30));
  const slant = textWidth(classes), top = slant * 0.75 + 16, most = Math.max(1, ...counts.flat());
  const largest = Math.min(step, row) * 0.62, parts = [];
  classes.forEach((name, c) => {
    const x = left + (c + 0.5) * step;
    parts.push(`<line class="grid-line" x1="${x}" x2="${x}" y1="${top}" y2="${top + clients.length * row}"/>`);
    if (c % Math.ceil(15 / step) === 0) parts.push(`<text transform="translate(${x + 3} ${top - 6}) rotate(-50)">${esc(name)}</text>`);
  });
  clients.forEach((name, k) => {
    const y = top + (k + 0.5) * row;
    parts.push(`<line class="grid-line" x1="${left}" x2="${left + classes.length * step}" y1="${y}" y2="${y}"/>`);
    if (k % Math.ceil(12 / row) === 0) parts.push(`<text class="name" x="${left - 6}" y="${y + 4}" text-anchor="end">${esc(name)}</text>`);
    classes.forEach((cls, c) => {
      const n = counts[k][c], at = `cx="${left + (c + 0.5) * step}" cy="${y}"`, says = esc(tip(`client ${name}`, [[null, cls, n]]));
      if (n) parts.push(`<circle ${at} r="${Math.max(1.2, largest * Math.sqrt(n / most)).toFixed(2)}" fill="var(--accent)" opacity=".8" data-tip="${says}"/>`);
      else if (allowed[k][c]) parts.push(`<circle ${at} r="1.2" fill="var(--quiet)" data-tip="${says}"/>`);
    });
  });
  svg(host, width, top + clients.length * row + 6, parts.join(""), label);
}

/** Points in the plane: [x, y, number of the mark, text of the tooltip]. */
function scatter(host, points, label) {
  const size = Math.max(200, Math.min(400, host.clientWidth || 340)), [xs, ys] = [0, 1].map((axis) => points.map((p) => p[axis]));
  const fit = (values) => {
    const low = Math.min(...values), high = Math.max(...values);
    return (v) => 8 + ((v - low) / (high - low || 1)) * (size - 16);
  };
  const [x, y] = [fit(xs), fit(ys)];
  const marks = points.map((p) => mark(p[2], x(p[0]).toFixed(1), y(p[1]).toFixed(1), 3, p[3]));
  svg(host, size, size, `<rect x=".5" y=".5" width="${size - 1}" height="${size - 1}" fill="none" class="axis"/>${marks.join("")}`, label);
}

const shade = (v) => (v == null ? "none" : `color-mix(in srgb, var(${v < 0 ? "--low" : "--high"}) ${Math.round(100 * Math.min(1, Math.abs(v)))}%, var(--mid))`);

/** A square of values in [-1, 1], a row and a column for each name. */
function heatMap(host, names, values, label) {
  const size = Math.max(200, Math.min(400, host.clientWidth || 340)), named = names.length <= 24;
  const left = named ? Math.min(110, textWidth(names)) + 8 : 0, step = (size - left) / names.length, parts = [];
  names.forEach((a, r) => {
    if (named) parts.push(`<text x="${left - 5}" y="${(r + 0.5) * step + 4}" text-anchor="end">${esc(a.slice(0, 16))}</text><text transform="translate(${left + (r + 0.5) * step + 4} ${names.length * step + 6}) rotate(-90)" text-anchor="end">${esc(a.slice(0, 16))}</text>`);
    names.forEach((b, c) => parts.push(`<rect x="${(left + c * step).toFixed(1)}" y="${(r * step).toFixed(1)}" width="${(step + 0.2).toFixed(1)}" height="${(step + 0.2).toFixed(1)}" style="fill:${shade(values[r][c])}" data-tip="${esc(tip(`${a} · ${b}`, [[null, "cosine", number(values[r][c])]]))}"/>`));
  });
  svg(host, size, names.length * step + (named ? left : 4), parts.join(""), label);
}
