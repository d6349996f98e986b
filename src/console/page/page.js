// Asks the node for its state every two seconds and shows it. Whatever came from a client, names above all,
// goes into the page as text; nothing is kept but the token, in memory.
"use strict";

const EVERY_MS = 2000;
const ANSWERS = [["dram", "dram"], ["nvme", "nvme"], ["object", "object"], ["pending", "pending"], ["miss", "miss"]];
const TIERS = ANSWERS.slice(0, 3);
const KEPT = 360;

const by = (id) => document.getElementById(id);
let token = null;
/** What a tenant's page has seen itself: the node keeps a history of the whole only. */
let seen = [];
let charts = null;

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at += 1) count /= 1024;
  return `${at === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
};
const number = (count) => count.toLocaleString("en-US");
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const sum = (values) => values.reduce((all, value) => all + value, 0);
const hits = (lookups) => sum(lookups.slice(0, 3));
const time = (ms) => {
  const s = ms / 1000;
  if (s < 1) return `${ms.toFixed(1)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
};
const ago = (s) => (s < 1 ? "now" : `${time(1000 * s)} ago`);

/** Puts children in, unless they look as before: so that a reader's place and choice stay. */
function put(into, ...children) {
  const next = element("div", "", ...children);
  if (into.innerHTML !== next.innerHTML) into.replaceChildren(...next.childNodes);
}

function shares(values, kinds) {
  const whole = sum(values);
  return kinds.map(([, name], at) => `${name} ${percent(values[at], whole)}`).join(", ");
}

function makeCharts() {
  const hitWords = (column) => `${ago(column.ago)}: ${number(sum(column.values))} blocks asked; ${shares(column.values, ANSWERS)}`;
  const byteWords = (column) => `${ago(column.ago)}: ${TIERS.map(([, name], at) => `${name} ${bytes(column.values[at] / (column.span || 1))}/s`).join(", ")}`;
  return {
    hits: new Stacked(by("hits"), ANSWERS, { share: true, say: hitWords, scale: (part) => `${Math.round(100 * part)} %`, nothing: "No lookups yet: no engine has asked for anything." }),
    bytes: new Stacked(by("bytes"), TIERS, { share: false, say: byteWords, scale: (rate) => `${bytes(rate)}/s`, nothing: "Nothing was delivered yet." }),
  };
}

function key(into, kinds, values, show) {
  const whole = sum(values);
  put(into, ...kinds.map(([kind, name], at) => element("li", "", element("i", kind), `${name} ${show(values[at], whole)}`)));
}

function showProblems(state) {
  const rank = (finding) => (finding.level === "problem" ? "problem" : "note");
  const items = state.problems.map((finding) => element("li", rank(finding), element("span", "what", finding.what), element("span", "", finding.seen), element("span", "advice", finding.advice)));
  by("problems").classList.toggle("well", items.length === 0);
  const well = state.operator ? "Nothing is wrong, as far as this node knows." : "Nothing is wrong with what is yours.";
  put(by("problem-list"), ...(items.length > 0 ? items : [element("li", "fine", element("span", "", well))]));
}

function showTop(state) {
  const bad = state.problems.filter((finding) => finding.level === "problem").length;
  const [kind, text] = state.phase !== "ready" ? ["note", state.phase] : bad > 0 ? ["bad", bad === 1 ? "1 problem" : `${bad} problems`] : ["good", "ready"];
  const phase = by("phase");
  phase.className = `pill ${kind}`;
  if (phase.textContent !== text) phase.textContent = text;
  document.title = `${bad > 0 ? `(${bad}) ` : ""}${state.node} – kvstrata`;
  by("node").textContent = state.node;
  const whose = state.tenant === null ? "" : `, what is ${state.tenant}'s`;
  by("about").textContent = `kvstrata ${state.version}, up ${time(state.uptime_ms)}${whose}`;
}

function showFigures(state) {
  const asked = sum(state.lookups);
  const figures = [
    [percent(hits(state.lookups), asked), "of blocks asked were here"],
    [number(asked), "blocks asked"],
    [bytes(sum(state.namespaces.map((of) => of.bytes))), "in namespaces"],
  ];
  if (state.operator) {
    figures.push([number(state.sessions), "sessions"]);
    figures.push([bytes(state.leased_bytes), `leased of ${bytes(state.leased_bytes_max)}`]);
  }
  put(by("figures"), ...figures.map(([value, name]) => element("li", "", element("b", "", value), element("span", "quiet", name))));
}

/** Columns of a tenant's page, from what it is told each time. */
function remember(state) {
  const now = performance.now() / 1000;
  const last = seen[seen.length - 1];
  if (last && state.uptime_ms < last.uptime) seen = [];
  seen.push({ at: now, uptime: state.uptime_ms, lookups: state.lookups });
  seen = seen.slice(-KEPT);
  return seen.slice(1).map((one, index) => ({
    ago: now - one.at,
    span: one.at - seen[index].at,
    values: one.lookups.map((count, at) => count - seen[index].lookups[at]),
  }));
}

function showCharts(state) {
  charts ??= makeCharts();
  const columns = (field) => state.history.map((one) => ({ ago: one.ago_ms / 1000, span: one.span_ms / 1000, values: one[field] }));
  const asked = state.operator ? columns("answers") : remember(state);
  const total = asked.reduce((all, column) => all.map((value, at) => value + column.values[at]), [0, 0, 0, 0, 0]);
  by("hits-about").textContent = state.operator ? "share of the blocks asked, of the last hour" : "share of the blocks asked, since this page was opened";
  charts.hits.draw(asked, `Shares of blocks asked: ${shares(total, ANSWERS)}`);
  key(by("hits-key"), ANSWERS, total, percent);
  by("bytes-card").hidden = !state.operator;
  if (!state.operator) return;
  const delivered = columns("bytes");
  const all = delivered.reduce((sums, column) => sums.map((value, at) => value + column.values[at]), [0, 0, 0]);
  by("bytes-about").textContent = "bytes a second, by the tier they came from";
  charts.bytes.draw(delivered, `Bytes delivered in the last hour: ${TIERS.map(([, name], at) => `${name} ${bytes(all[at])}`).join(", ")}`);
  key(by("bytes-key"), TIERS, all, bytes);
}

function showTiers(state) {
  by("tiers-card").hidden = !state.operator;
  if (!state.operator) return;
  const read = sum(state.tiers.map((tier) => tier.get_blocks));
  put(by("tiers"), ...state.tiers.map((tier) => {
    const of = tier.capacity_bytes > 0 ? ` of ${bytes(tier.capacity_bytes)}, ${percent(tier.used_bytes, tier.capacity_bytes)}` : "";
    const speed = tier.load_bytes_per_second ? `, loads at ${bytes(tier.load_bytes_per_second)}/s` : "";
    const state_ = tier.state === "ok" ? [] : [element("span", "flag", tier.state)];
    const made = element("div", "tier",
      element("p", "line", element("span", "name", element("i", `swatch ${tier.tier}`), tier.tier), ...state_, element("span", "", `${bytes(tier.used_bytes)}${of}`)),
      ...(tier.capacity_bytes > 0 ? [bar([[tier.tier, tier.used_bytes]], tier.capacity_bytes, `${tier.tier} holds ${bytes(tier.used_bytes)}${of}`)] : []),
      element("p", "quiet", `${number(tier.blocks)} blocks, ${number(tier.evicted_blocks)} evicted; ${percent(tier.get_blocks, read)} of what was read${speed}`));
    made.dataset.tier = tier.tier;
    return made;
  }));
}

/** The page of another member, if what it says of itself is an address and nothing else. */
function linkTo(member) {
  const isAddress = /^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$/.test(member.http);
  if (member.own || !isAddress) return element("span", "name", member.name);
  const link = element("a", "name", member.name);
  link.href = `${location.protocol}//${member.http}/console`;
  link.rel = "noreferrer";
  return link;
}

function showMembers(state) {
  const zones = new Map();
  for (const member of state.members) zones.set(member.zone, [...(zones.get(member.zone) ?? []), member]);
  const node = (member) => {
    const marks = [member.own ? "this node" : "", member.draining ? "draining" : ""].filter(Boolean).join(", ");
    const engines = member.engines === 1 ? "home of 1 engine" : `home of ${number(member.engines)} engines`;
    const host = member.host && member.host !== member.name ? `on ${member.host}` : "";
    return element("li", `${member.own ? "own" : ""}${member.draining ? " draining" : ""}`,
      linkTo(member), " ", element("span", "mark", marks),
      ...[engines, [host, member.version && `kvstrata ${member.version}`].filter(Boolean).join(", "), member.endpoint].filter(Boolean).map((line) => element("p", "quiet", line)));
  };
  const names = [...zones.keys()].sort();
  put(by("members"), ...names.map((zone) => element("div", "zone",
    ...(zone || names.length > 1 ? [element("h3", "", zone ? `zone ${zone}` : "zone unknown")] : []),
    element("ul", "nodes", ...zones.get(zone).sort((a, b) => a.name.localeCompare(b.name)).map(node)))));
  const more = state.member_count > state.members.length ? `, ${state.members.length} of them shown` : "";
  by("members-about").textContent = `${state.member_count === 1 ? "one node" : `${number(state.member_count)} nodes`}, as this one sees them${more}`;
}

/** A table whose cells know the head of their column: on a phone each row is a card. */
function table(into, heads, rows, nothing) {
  if (rows.length === 0) return put(into, element("p", "empty", nothing));
  const head = element("tr", "", ...heads.map(([name, kind]) => {
    const cell = element("th", kind, name);
    cell.scope = "col";
    return cell;
  }));
  const body = rows.map((cells) => element("tr", "", ...cells.map((content, at) => {
    const cell = element("td", heads[at][1], content);
    cell.dataset.head = heads[at][0];
    return cell;
  })));
  return put(into, element("table", "", element("thead", "", head), element("tbody", "", ...body)));
}

function showTables(state) {
  table(by("slowest"), [["Tier", ""], ["Took", "number"], ["Bytes", "number"], ["Rate", "number"], ["Namespace", ""], ["When", "number"]],
    state.slowest.map((load) => [
      element("span", "", element("i", `swatch ${load.tier}`), load.tier), time(load.took_ms), bytes(load.bytes),
      `${bytes((1000 * load.bytes) / load.took_ms)}/s`, element("code", "", load.namespace), ago(Math.floor(load.ago_ms / 10000) * 10)]),
    "None took a millisecond.");
  table(by("namespaces"), [["Model", ""], ["Engine", ""], ["Blocks", "number"], ["Bytes", "number"], ["Hits", "number"]],
    state.namespaces.map((of) => {
      const asked = sum(of.lookups);
      const share = element("span", "", percent(hits(of.lookups), asked));
      if (asked > 0) share.append(bar(ANSWERS.map(([kind], at) => [kind, of.lookups[at]]), asked, shares(of.lookups, ANSWERS)));
      return [element("span", "", of.model, " ", element("code", "quiet", of.id)), of.engine, number(of.blocks), bytes(of.bytes), share];
    }),
    "No engine has come by since the start: is its endpoint set to this node?");
  const more = state.namespace_count > state.namespaces.length ? `the largest ${state.namespaces.length} of ${number(state.namespace_count)}` : "";
  by("namespaces-about").textContent = more;
}

function show(state) {
  showTop(state);
  showProblems(state);
  showFigures(state);
  showCharts(state);
  showTiers(state);
  showMembers(state);
  showTables(state);
  by("ask").hidden = true;
  by("state").hidden = false;
  by("state").classList.remove("old");
  by("foot").textContent = "Asked every two seconds.";
}

/** The node wants a token, or another one: it is asked for, and nothing is polled until then. */
function wantToken() {
  by("refused").hidden = token === null;
  by("refused").textContent = "That token is not valid here.";
  token = null;
  by("state").hidden = true;
  by("ask").hidden = false;
  by("phase").className = "pill";
  by("phase").textContent = "locked";
  by("token").focus();
}

function lost(why) {
  by("state").classList.add("old");
  by("phase").className = "pill bad";
  by("phase").textContent = "no answer";
  by("foot").textContent = `The node does not answer (${why}); what is shown is old.`;
}

async function ask() {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  const answer = await fetch("console/state", { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (answer.status === 401) return wantToken();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return show(await answer.json());
}

async function poll() {
  if (!document.hidden && by("ask").hidden) await ask().catch((error) => lost(error.message));
  setTimeout(poll, EVERY_MS);
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = by("token").value.trim();
  by("token").value = "";
  ask().catch((error) => lost(error.message));
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && by("ask").hidden) ask().catch((error) => lost(error.message));
});
poll();
