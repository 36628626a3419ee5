// The page: a section for each question, drawn from the data inside the page; a choice redraws the page.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const kept = (() => {
  try {
    return JSON.parse(sessionStorage.getItem("fednca") ?? "{}");
  } catch {
    return {};
  }
})();
const chosen = { metric: "macro_f1", part: "test", x: "rounds", way: "val", byClass: "class_f1", client: 0, dots: "class", hidden: [], ...kept };
const MOST_SIGNS = 20; // most lines that a reader can distinguish
const drawings = [];
const groups = data.groups.map((group, i) => ({ ...group, i }));
const visible = () => groups.filter((group) => !chosen.hidden.includes(group.label));
const prettify = (name) => name.replaceAll("_", " ").trim();

function redraw() {
  try {
    sessionStorage.setItem("fednca", JSON.stringify(chosen));
  } catch {
    // without session storage the page only forgets its choices
  }
  for (const draw of drawings) draw();
}

/** A part of the page that is redrawn after every choice. */
function drawn(host, draw) {
  drawings.push(() => draw(host));
  return host;
}

/** A section with a title, a text (or nodes) below it, and a short name in the navigation. */
function section(id, short, title, text, ...content) {
  page.append(h("section", { id }, h("h2", {}, title), text && h("p", { class: "quiet small" }, ...[text].flat()), ...content));
  document.querySelector("nav").append(h("a", { href: `#${id}` }, short));
}

/** A heading that names the current choices, since a printed page does not show the buttons. */
const caption = (text) => drawn(h("h3"), (host) => host.replaceChildren(...[text()].flat()));

/** Buttons, one of them pressed; options: value → text. */
function choices(title, key, options) {
  const buttons = Object.entries(options).map(([value, text]) =>
    h("button", { type: "button", "data-choice": `${key}:${value}`, onclick: () => { chosen[key] = value; redraw(); } }, text));
  drawings.push(() => buttons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.choice === `${key}:${chosen[key]}`)));
  return [h("span", {}, title), ...buttons];
}

function table(head, rows, kind = "") {
  const cell = (tag) => (content) => h(tag, {}, ...[content].flat());
  return h("div", { class: "scroll" }, h("table", { class: kind }, h("thead", {}, h("tr", {}, head.map(cell("th")))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell("td")))))));
}

const grid = (least, ...children) => h("div", { class: "grid", style: `--least:${least}px` }, ...children);
const signed = (group) => [html(swatch(group.i)), ` ${group.label}`];
const keys = (names, draw = swatch, signs = names.keys()) => h("div", { class: "keys" }, [...signs].map((i, n) => h("span", {}, html(draw(i)), names[n])));

function duration(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${number(seconds)} s`;
}

function heading() {
  const runs = groups.flatMap((group) => group.runs), open = runs.filter((run) => !run.finished);
  const names = [...new Set(data.settings.map((setting) => setting.dataset))].join(", ");
  const state = open.length
    ? h("span", { class: "pill running", id: "state" }, `${open.length} of ${runs.length} runs not finished: round ${open.map((run) => `${run.rounds} of ${run.of}`).slice(0, 3).join(", ")}${open.length > 3 ? ", …" : ""}`)
    : h("span", { class: "pill", id: "state" }, "finished");
  page.append(
    h("header", {}, h("h1", {}, document.title, " ", state),
      h("p", { class: "quiet" }, `${names}: ${groups.length} ${groups.length === 1 ? "method" : "methods"}, ${runs.length} ${runs.length === 1 ? "run" : "runs"} · made ${data.made.replace("T", " ").replace("+00:00", " UTC")} by fednca ${data.version}${open.length ? " · this page reloads every 30 seconds" : ""}`)),
    h("div", { class: "bar" }, h("nav", { "aria-label": "sections" }),
      h("div", { class: "legend", role: "group", "aria-label": "methods shown" }, groups.map((group) => {
        const button = h("button", { type: "button", "data-group": group.label, title: "show or hide", onclick: () => {
          chosen.hidden = chosen.hidden.includes(group.label) ? chosen.hidden.filter((label) => label !== group.label) : [...chosen.hidden, group.label];
          redraw();
        } }, ...signed(group));
        drawings.push(() => button.setAttribute("aria-pressed", !chosen.hidden.includes(group.label)));
        return button;
      }))));
  if (open.length) setTimeout(() => location.reload(), 30000);
}

function whatWasRun() {
  const cards = data.settings.map((setting) => {
    const p = setting.partition, images = setting.report?.images;
    const split = p.kind === "natural" ? `${p.clients} clients, one for each site in the data` : `${p.clients} clients, β = ${p.beta}, γ = ${p.gamma}`;
    return h("p", {}, h("b", {}, setting.dataset), `: ${setting.classes.length} classes, ${images ? `${images.train} training, ${images.val} validation and ${images.test} test images, ` : ""}${setting.image_size} px; ${split}; ${setting.backbone}, ${setting.rounds} rounds`);
  });
  const methods = [...new Map(groups.flatMap((group) => group.methods).map((method) => [method.name, method])).values()];
  const plain = (group) => Object.entries(group.options).map(([path, value]) => `${path.replace("method.options.", "").replace("method.learner_options.", "learner ").replace("method.closing_options.", "closing ")} = ${value}`).join(", ");
  const about = table(["method", "what it is", "formula", "from"], methods.map((m) => [h("b", {}, m.name), [m.summary, h("br"), h("small", {}, Object.entries(m.changes).map(([k, v]) => `${k}: ${v}`).join(" · "))], h("code", {}, m.formula), m.paper]), "words");
  const apart = Object.entries(data.differing);
  section("what", "What was run", "What was run", "β (beta) says how evenly the clients that hold a class share its images: the smaller, the less evenly. γ (gamma) is the share of all classes that a client may hold. A head turns image features into one score per class. LADM (label-aware disentanglement) is an attention module that reads one feature per class from the image; an ETF (equiangular tight frame) is a set of fixed class vectors, all at the same, largest possible angle to each other. BCE is binary cross-entropy.", ...cards, about,
    apart.length ? [h("h3", {}, "Settings that differ between runs"), table(["", ...apart.map(([path]) => h("code", {}, path))], groups.map((group) => [signed(group), ...apart.map(([, values]) => values[group.i])]))] : null,
    h("details", {}, h("summary", {}, "All settings, options and run folders"),
      table(["", "options", "run folders"], groups.map((group) => [signed(group), plain(group) || "none", group.runs.map((run) => run.folder).join(", ")]), "words"),
      table(["setting", "value in all runs"], Object.entries(data.shared).map(([path, value]) => [h("code", {}, path), value]), "words")));
}

function results() {
  const columns = Object.entries(data.metrics), calibrated = { macro_f1: "macro-F1 cal.", micro_f1: "micro-F1 cal." };
  section("results", "Results", "Results", "Test metrics in percent: mean ± sample standard deviation over seeds; the best of each column is bold. Macro averages over classes, micro counts all labels together. AUC and AP judge only how labels are ranked. F1 counts a class as found above probability 0.5; F1 cal. above a calibrated threshold, chosen for each class on the clients' validation images.",
    h("div", { class: "choices" }, choices("round chosen by", "way", data.selections)),
    caption(() => `Round: ${data.selections[chosen.way]}`),
    drawn(h("div", { id: "results-table" }), (host) => {
      const rows = visible().map((group) => ({ group, found: group.results[chosen.way] })).filter((row) => row.found);
      const values = (row) => [...columns.map(([key]) => row.found.test[key]), ...Object.keys(calibrated).map((key) => row.found.calibrated[key])];
      const best = rows.length > 1 ? values(rows[0]).map((_, c) => Math.max(...rows.map((row) => values(row)[c]?.mean ?? -1))) : [];
      const write = (value, c, paper) => {
        if (!value) return "–";
        const text = percent(value.mean), spread = value.std == null ? null : h("small", {}, ` ±${percent(value.std)}`);
        return [value.mean === best[c] ? h("b", {}, text) : text, spread, paper == null ? null : h("small", { class: "paper" }, `paper ${paper.toFixed(1)}`)].filter(Boolean);
      };
      const body = rows.map((row) => [signed(row.group), ...values(row).map((value, c) => write(value, c, row.group.published[columns[c]?.[0]])), row.found.rounds.join(", "), row.group.runs.map((run) => run.seed).join(", ")]);
      host.replaceChildren(body.length ? table(["", ...columns.map(([, name]) => name), ...Object.values(calibrated), "round", "seeds"], body) : h("p", { class: "quiet" }, "no results yet"));
      const undefinedIn = rows.flatMap(({ group, found }) => [["AUC", found.classes.class_auc], ["F1", found.classes.class_f1]].map(([name, list]) => [name, list.filter((value) => !value).length, list.length, group.label])).filter(([, missing]) => missing);
      host.append(...undefinedIn.map(([name, missing, all, label]) => h("p", { class: "quiet small" }, `${label}: ${name} is not defined for ${missing} of ${all} classes; its mean leaves them out.`)));
    }));
}

function curves() {
  section("curves", "Curves", "Learning curves", "A line is the mean over seeds, its band reaches from the lowest to the highest seed. Hover for values.",
    h("div", { class: "choices" }, choices("metric", "metric", data.curved)),
    h("div", { class: "choices" }, choices("images", "part", { test: "test", val: "validation" }), choices("against", "x", { rounds: "rounds", seconds: "time" })),
    caption(() => `${data.curved[chosen.metric]} on ${chosen.part === "test" ? "test" : "validation"} images, percent`),
    drawn(h("div", { id: "curves-chart" }), (host) => {
      const clock = (group, x) => (chosen.x === "rounds" ? x : x.map((round) => group.seconds[round - 1]));
      const series = visible().map((group) => {
        const band = group.curves[`${chosen.part}.${chosen.metric}`];
        return { i: group.i, name: group.label, ...band, x: clock(group, band.x) };
      });
      lineChart(host, series, { xlabel: chosen.x === "rounds" ? "round" : "seconds", label: `${data.curved[chosen.metric]} by ${chosen.x}`, height: 360, show: percent, showTick: wholePercent, whole: chosen.x === "rounds" });
    }));
}

function byClass() {
  const charts = data.settings.map((setting, place) => drawn(h("div", { class: "class-chart" }), (host) => {
    const counts = setting.report ? setting.classes.map((name) => setting.report.clients.reduce((sum, client) => sum + client.positives[name], 0)) : null;
    const own = visible().filter((group) => group.setting === place && group.results[chosen.way]);
    const order = setting.classes.map((_, c) => c);
    if (counts) order.sort((a, b) => counts[a] - counts[b] || a - b);
    const rows = order.map((c) => ({ name: prettify(setting.classes[c]), count: counts?.[c], points: own.map((group) => ({ i: group.i, name: group.label, value: group.results[chosen.way].classes[chosen.byClass][c] })) }));
    dotPlot(host, rows, { counted: counts && "training images", xlabel: `${data.by_class[chosen.byClass]} on test images, percent`, label: `${data.by_class[chosen.byClass]} of each class` });
  }));
  section("classes", "Classes", "Classes, the rarest first", "One mark per method at its mean over seeds; the line behind it reaches from the lowest to the highest seed. The round is the one chosen under Results.",
    h("div", { class: "choices" }, choices("metric", "byClass", data.by_class)), ...charts);
}

function partition() {
  const parts = data.settings.map((setting) => {
    if (!setting.report) return h("p", { class: "quiet" }, `${setting.dataset}: ${setting.missing}`);
    const { report } = setting, clients = report.clients.map((client) => prettify(client.name));
    const classes = setting.classes.map(prettify), allowed = report.clients.map((client) => setting.classes.map((name) => client.allowed_classes.includes(name)));
    const signs = setting.stacked.names.map((_, c) => (c === 19 && classes.length > 20 ? -1 : c)); // with many classes the last one is the sum of all others
    const left = Object.values(report.left_out).reduce((a, b) => a + b, 0);
    const facts = [["label distance", report.label_distance], ["co-occurrence distance", report.cooccurrence_distance], ["classes missing per client", report.missing_classes]].map(([name, value]) => `${name} ${value == null ? "not defined" : number(value)}`);
    return h("div", {}, h("p", { class: "small" }, `${setting.dataset}: ${facts.join(" · ")} · ${left} training images fit no client and are left out`), grid(classes.length > 25 ? 900 : 440,
      h("div", {}, h("h3", {}, "Classes of each client"), drawn(h("div", { class: "stacked" }), (host) => stackedBars(host, clients, setting.stacked.names, signs, setting.stacked.counts, "positive labels by client and class")), keys(setting.stacked.names, boxSwatch, signs)),
      h("div", {}, h("h3", {}, "Images by client and class"), drawn(h("div", { class: "bubbles" }), (host) => bubbleChart(host, clients, classes, setting.counts, allowed, "images by client and class")), h("p", { class: "quiet small" }, "A bubble's area is the number of images; a dot marks a class that the client may hold but has no image of."))));
  });
  section("partition", "Partition", "Who holds what", "How the training images are divided among the clients. Label distance is the mean Jensen-Shannon distance between the label distributions of two clients (0: equal, 1: no label in common); co-occurrence distance is the same for pairs of labels on one image.", ...parts);
}

function clients() {
  section("clients", "Clients", "Clients", "The total training loss of each client by round, averaged over seeds, for one method at a time; beside it each client's training and validation images, and the classes it has images of, out of those it may hold.",
    h("div", { class: "choices" }, choices("method", "client", Object.fromEntries(groups.map((group) => [group.i, group.label])))),
    caption(() => signed(groups[chosen.client] ?? groups[0])),
    grid(440, drawn(h("div", { id: "clients-chart" }), (host) => {
      const group = groups[chosen.client] ?? groups[0], names = group.centralized ? ["with all images"] : data.settings[group.setting].report?.clients.map((client) => prettify(client.name));
      const crowd = Object.keys(group.clients).length > MOST_SIGNS;
      const series = Object.entries(group.clients).map(([k, own]) => ({ i: crowd ? 1 : +k, name: `client ${names?.[k] ?? k}`, ...own }));
      lineChart(host, series, { xlabel: "round", label: `loss of each client, ${group.label}`, height: 330, thin: crowd });
    }), drawn(h("div", { id: "clients-table", class: "limited" }), (host) => {
      const group = groups[chosen.client] ?? groups[0], { report } = data.settings[group.setting];
      const last = (k) => number(group.clients[k]?.mean.at(-1));
      const rows = Object.keys(group.clients).map((k) => {
        const client = group.centralized ? null : report?.clients[k];
        const sign = Object.keys(group.clients).length > MOST_SIGNS ? "" : html(swatch(+k));
        const facts = client ? [client.images, client.val_images, `${Object.values(client.positives).filter(Boolean).length} of ${client.allowed_classes.length}`] : ["–", "–", "–"];
        return [[sign, ` ${group.centralized ? "all images" : prettify(client?.name ?? k)}`], ...facts, last(k)];
      });
      host.replaceChildren(table(["client", "training", "validation", "classes held", "last loss"], rows));
    })));
}

function losses() {
  const terms = [...new Set(groups.flatMap((group) => Object.keys(group.losses)))];
  section("losses", "Losses", "Loss terms", "The parts that add up to the training loss, each with its weight, averaged over the training images: bce is binary cross-entropy, neg and pos are FedNCA-ML's regularisers L_Neg and L_Pos.", grid(330, ...terms.map((term) => h("div", { class: "keep" }, h("h3", {}, term), drawn(h("div", { class: "loss-chart" }), (host) =>
    lineChart(host, visible().filter((group) => group.losses[term]).map((group) => ({ i: group.i, name: group.label, ...group.losses[term] })), { xlabel: "round", label: `loss term ${term}`, height: 220 }))))));
}

function collapse() {
  const measures = { nc1: "NC1: spread within classes", nc2: "NC2: class means to simplex", nc3: "NC3: class means to classifier" };
  const some = groups.some((group) => group.collapse.nc1.x.length);
  const text = some ? "Neural collapse is what happens to a classifier that is trained long enough: the features of each class shrink to one point (NC1 goes to 0), these points spread out evenly, like the corners of a simplex, all equally far apart (NC2 goes to 0), and the classifier's vectors line up with them (NC3 goes to 0). Measured on validation images, with one feature for each image and each of its labels: NC1 = tr(Σ_W Σ_B⁺)/C, NC2 = ‖G/‖G‖ − G*/‖G*‖‖ of the Gram matrices of class means and simplex, NC3 = ‖M/‖M‖ − W/‖W‖‖²." : ["Not measured in these runs. ", h("code", {}, "--collapse true"), " measures it in every evaluated round."];
  section("collapse", "Collapse", "Neural collapse", text, some ? grid(330, ...Object.entries(measures).map(([name, title]) => h("div", { class: "keep" }, h("h3", {}, title), drawn(h("div", { class: "collapse-chart" }), (host) =>
    lineChart(host, visible().map((group) => ({ i: group.i, name: group.label, ...group.collapse[name] })), { xlabel: "round", label: title, height: 230, log: name === "nc1" }))))) : null);
}

function pictures() {
  if (!data.pictures.length) return section("pictures", "Features", "Features and evidence", data.no_pictures);
  const panel = (place, draw) => drawn(h("div", { class: "panels" }), (host) => {
    const own = data.pictures[place].looks.filter((look) => !chosen.hidden.includes(groups[look.group].label));
    host.replaceChildren(...own.map((look) => h("div", { class: "keep" }, h("h3", {}, ...signed(groups[look.group])), h("div"))));
    own.forEach((look, n) => draw(host.children[n].lastChild, look));
  });
  section("pictures", "Features", "Features and evidence", ["From the first finished run of each method, on test images; ", h("code", {}, "fednca figures"), ` draws them larger and with more images. ${data.no_pictures}`],
    ...data.pictures.flatMap((shown, place) => {
      const classes = data.settings[shown.setting].classes.map(prettify), most = Math.max(1, ...shown.looks.flatMap((look) => look.tsne?.labels ?? []));
      const dots = (look) => look.tsne.points.map(([x, y], n) => [x, y, chosen.dots === "class" ? look.tsne.classes[n] : look.tsne.labels[n] - 1, tip(classes[look.tsne.classes[n]], [[null, "labels of the image", look.tsne.labels[n]]])]);
      return [
        h("h3", {}, "t-SNE of test features: near points are similar; one point for each image and label"),
        h("div", { class: "choices" }, choices("colour by", "dots", { class: "class", labels: "number of labels" })),
        panel(place, (host, look) => look.tsne ? scatter(host, dots(look), `t-SNE, ${groups[look.group].label}`) : host.append("too few images for a map")),
        drawn(h("div"), (host) => host.replaceChildren(keys(chosen.dots === "class" ? classes : Array.from({ length: most }, (_, n) => `${n + 1} ${n ? "labels" : "label"}`)))),
        h("h3", {}, "Cosines between the mean features of two classes (1: same direction, -1: opposite)"),
        panel(place, (host, look) => heatMap(host, classes, look.cosine, `cosines of class means, ${groups[look.group].label}`)),
        h("div", { class: "keys" }, [-1, -0.5, 0, 0.5, 1].map((v) => h("span", {}, h("span", { class: "swatch", style: `background:${shade(v)};border:1px solid var(--line)` }), String(v)))),
        h("h3", {}, "Where a model finds each class of a test image"),
        h("p", { class: "quiet small" }, "Bright is strong. The maps show attention for a model with one feature per class, Grad-CAM for others. Below each map: the probability that the model gives the class."),
        drawn(h("div"), (host) => host.replaceChildren(evidence(shown, classes))),
      ];
    }));
}

function evidence(shown, classes) {
  const own = shown.looks.filter((look) => !chosen.hidden.includes(groups[look.group].label));
  const cells = shown.examples.flatMap((example, e) => example.classes.flatMap((c, n) => [
    h("figure", {}, h("img", { src: example.image, alt: `test image with ${example.classes.map((each) => classes[each]).join(", ")}` }), h("figcaption", {}, classes[c])),
    ...own.map((look) => h("figure", {}, h("img", { src: look.evidence[e][n].image, alt: `evidence for ${classes[c]}, ${groups[look.group].label}` }), h("figcaption", {}, html(swatch(look.group)), ` ${percent(look.evidence[e][n].probability)} %`))),
  ]));
  const across = own.length + 1, sets = Math.max(1, Math.floor(8 / across));
  return h("div", { class: `evidence ${shown.pixels ? "pixels" : ""}`, style: `grid-template-columns:repeat(${across * sets}, minmax(0, 118px))` }, cells);
}

function speed() {
  const mean = (values) => { const known = values.filter((v) => v != null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
  const runs = groups.flatMap((group) => group.runs), packages = Object.entries(runs.find((run) => run.packages.torch)?.packages ?? {}).filter(([, v]) => v);
  section("speed", "Time", "Time and throughput", "Medians over rounds, averaged over seeds; the time of a round includes its evaluation.",
    drawn(h("div", { id: "speed-table" }), (host) => host.replaceChildren(table(["", "images trained per second", "seconds per round", "of which training", "all rounds", "device", "engine"], visible().map((group) => [signed(group), number(mean(group.runs.map((run) => run.images_per_second))), number(mean(group.runs.map((run) => run.seconds_per_round))), number(mean(group.runs.map((run) => run.train_seconds))), duration(mean(group.runs.map((run) => run.seconds))), [...new Set(group.runs.map((run) => run.device))].join(", "), [...new Set(group.runs.map((run) => run.engine))].join(", ")])))),
    packages.length ? h("p", { class: "quiet small" }, packages.map(([name, value]) => `${name} ${value}`).join(" · ")) : null);
}

for (const part of [heading, whatWasRun, results, curves, byClass, partition, clients, losses, collapse, pictures, speed]) part();
redraw();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = false; }));
