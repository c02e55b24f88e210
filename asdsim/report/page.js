"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const D = JSON.parse($("data").textContent);
  const SIGN = { exact: "=", relaxed: "~", rejected: "x", replacement: ">", bonus: "+", discarded: "-", past_end: "." };
  const WORDS = {
    exact: "draft token accepted: the target's own choice",
    relaxed: "draft token accepted although the target chose another",
    rejected: "draft token refused; verification of the block ends here",
    replacement: "the target's choice, committed in place of the refused token",
    bonus: "the target's choice behind a block that was accepted whole",
    discarded: "verified, but behind the refused token",
    past_end: "behind the end of the output",
  };
  const SHORT = { exact: "exact", relaxed: "relaxed", rejected: "rejected", replacement: "replacement", bonus: "bonus", discarded: "discarded", past_end: "past the end" };
  const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array, float64: Float64Array };
  const C = {};
  let posStart, state = { setting: D.start, request: 0, step: -1 }, against = 0, fixed = null;
  let sort = { key: "", down: true }, settingOrder = [], requestOrder = [];

  // --- text: everything from outside becomes text nodes, and what is not seen becomes an escape
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\p{Cn}]|(?! )\p{Zs}/gu;
  const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  const escape = (text, keep = "") => text.replace(HIDDEN, (sign) => {
    if (keep.includes(sign)) return sign;
    const code = sign.codePointAt(0), hex = code.toString(16);
    return NAMED[sign] || (code < 256 ? "\\x" + hex.padStart(2, "0") : code < 65536 ? "\\u" + hex.padStart(4, "0") : "\\U" + hex.padStart(8, "0"));
  });
  const pieceOf = (word) => {
    const text = D.vocabulary[word];
    return typeof text === "string" ? text : text.map((octet) => "\\x" + octet.toString(16).toUpperCase().padStart(2, "0")).join("");
  };
  const shown = (word) => escape(pieceOf(word)).replace(/^ +| +$/g, (blank) => "·".repeat(blank.length));
  const special = new Set(D.special);
  const textOf = (words) => {
    const parts = words.filter((word) => !special.has(word)).map((word) => D.vocabulary[word]);
    let text;
    if (parts.every((part) => typeof part === "string")) text = parts.join("");
    else {
      const encoder = new TextEncoder();
      const chunks = parts.map((part) => (typeof part === "string" ? encoder.encode(part) : Uint8Array.from(part)));
      const all = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
      let filled = 0;
      for (const chunk of chunks) { all.set(chunk, filled); filled += chunk.length; }
      text = new TextDecoder().decode(all);
    }
    return D.dropLeading && text.startsWith(" ") ? text.slice(1) : text;
  };
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  };
  const draw = (tag, attributes = {}, text = null) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    return element;
  };

  // --- walks
  const number = (value) => (value === "inf" ? Infinity : value);
  const walkOf = (setting, request) => C.walk[setting * D.requests.length + request];
  const rowsOf = (walk) => [C.w_ptr[walk], C.w_ptr[walk + 1]];
  const cache = new Map();
  const outputOf = (walk) => {
    if (!cache.has(walk)) {
      const words = [], [first, behind] = rowsOf(walk);
      for (let row = first; row < behind; row++) {
        const origin = posStart[C.w_step[row]], accepted = C.w_acc[row], committed = C.w_com[row];
        for (let i = 0; i < committed; i++) words.push(i < accepted ? C.p_draft[origin + i] : C.p_choice[origin + i]);
      }
      const known = !C.w_end.subarray(first, behind).some((end) => D.final[end >> 3] === "missing");
      cache.set(walk, { words, known, spent: behind > first ? C.w_spent[behind - 1] : 0, text: null });
    }
    return cache.get(walk);
  };
  const textOfWalk = (walk) => {
    const output = outputOf(walk);
    if (output.text === null) output.text = textOf(output.words);
    return output.text;
  };
  const partedAt = (a, b) => {
    const first = outputOf(a), second = outputOf(b), shared = Math.min(first.words.length, second.words.length);
    for (let i = 0; i < shared; i++) if (first.words[i] !== second.words[i]) return i;
    return first.words.length === second.words.length || !(first.known && second.known) ? -1 : shared;
  };
  const scoreOf = (setting, row) => C["score" + D.settings[setting].layout][row];
  const stepsOf = (setting, walk) => {
    const entry = D.settings[setting], [first, behind] = rowsOf(walk), steps = [];
    let spent = 0, start = 0, guess = false;
    for (let row = first; row < behind; row++) {
      const step = C.w_step[row], origin = posStart[step], drafted = C.s_k[step], accepted = C.w_acc[row], committed = C.w_com[row];
      const ended = D.ended[C.w_end[row] & 7], final = D.final[C.w_end[row] >> 3];
      const refused = ["gate", "budget", "cap", "mismatch"].includes(ended);
      const tokens = [];
      let paid = 0;
      const token = (kind, i, word) => ({ kind, i, word, choice: C.p_choice[origin + i], row: origin + i, step: row - first });
      for (let i = 0; i < drafted; i++) {
        const score = scoreOf(setting, origin + i), mismatch = !Number.isNaN(score) || C.p_draft[origin + i] !== C.p_choice[origin + i];
        let kind = "exact";
        if (i >= accepted) kind = i === accepted && refused ? "rejected" : refused ? "discarded" : "past_end";
        else if (mismatch) kind = "relaxed";
        if (!refused && i === accepted && committed > accepted) tokens.push(token("bonus", i, C.p_choice[origin + i]));
        const drawn = token(kind, i, C.p_draft[origin + i]);
        if (mismatch) { drawn.regret = C.p_regret[origin + i]; drawn.score = score; }
        if (kind === "relaxed") { drawn.before = spent + paid; paid += drawn.regret; drawn.after = spent + paid; }
        tokens.push(drawn);
        if (kind === "rejected" && committed > accepted) tokens.push(token("replacement", i, C.p_choice[origin + i]));
      }
      if (!refused && accepted === drafted && committed > accepted) tokens.push(token("bonus", accepted, C.p_choice[origin + accepted]));
      const after = C.w_spent[row];
      steps.push({ number: row - first, id: C.s_id[step], wave: C.s_wave[step], start, spent, after, ended, final, tokens, guess, paid, rule: entry.rule });
      spent = after;
      start += committed;
      guess = guess || final === "missing";
    }
    return steps;
  };
  const reason = (entry, step) => {
    const refused = step.tokens.find((token) => token.kind === "rejected");
    const g = number(entry.g), B = number(entry.B);
    let text = { block: "all accepted", end: step.final === "limit" ? "token limit" : "end of the output" }[step.ended];
    if (step.ended === "mismatch") text = `mismatch, regret ${refused.regret.toFixed(2)}`;
    if (step.ended === "gate") {
      text = entry.rule === "asd" ? `gate: ${refused.score.toFixed(2)} > ${g} by ${(refused.score - g).toFixed(2)}` : `refused by ${entry.rule}`;
      if (entry.rule !== "asd" && Number.isFinite(refused.score)) text += `: ${refused.score.toPrecision(3)} > ${g}`;
    }
    if (step.ended === "budget") {
      const before = entry.ledger === "block" ? 0 : step.spent;
      text = `budget: ${B} exceeded by ${(before + step.paid + refused.regret - B).toFixed(2)}`;
    }
    if (step.ended === "cap") text = `cap: more than ${entry.M}`;
    if (step.ended !== "end" && (step.final === "eos" || step.final === "limit")) text += step.final === "eos" ? "; end of the output" : "; token limit";
    if (step.final === "missing") text += "; the walk leaves the trace here";
    return text + (step.guess ? " (estimate)" : "");
  };

  // --- settings
  const value = (entry, name) => (entry.figures[name] ? entry.figures[name][0] : NaN);
  const gainName = () => (D.figures.some((figure) => figure.name === "speed_up") ? "speed_up" : "mean_acceptance_length");
  const figureOf = (name) => D.figures.find((figure) => figure.name === name);
  const shownValue = (figure, x) => (x * figure.factor).toFixed(figure.factor === 100 ? 1 : 3);
  const fronts = () => {
    const risk = $("risk").value, gain = gainName(), sign = risk === "accuracy" ? -1 : 1;
    const rows = D.settings.map((entry, n) => [n, sign * value(entry, risk), value(entry, gain), entry.caveat])
      .filter((row) => !row[3] && Number.isFinite(row[1]) && Number.isFinite(row[2]))
      .sort((a, b) => a[1] - b[1] || b[2] - a[2]);
    const front = new Set();
    let best = -Infinity;
    for (const [n, , y] of rows) if (y > best) { best = y; front.add(n); }
    return front;
  };
  const matches = (entry, filter) => {
    const facts = entry.name.toLowerCase().split(/\s+/);
    return filter.toLowerCase().split(/\s+/).filter(Boolean).every((word) => facts.some((fact) => fact === word) || (!word.includes("=") && entry.name.toLowerCase().includes(word)));
  };
  const tabled = () => {
    const front = fronts(), columns = [["name", "setting"], ["exact", "exact"], ...D.figures.map((figure) => [figure.name, figure.head])];
    const key = (n) => (sort.key === "name" || !sort.key ? n : sort.key === "exact" ? D.settings[n].exact : value(D.settings[n], sort.key));
    settingOrder = D.settings.map((_, n) => n).filter((n) => matches(D.settings[n], $("setting-filter").value) && (!$("front-only").checked || front.has(n)));
    settingOrder.sort((a, b) => {
      const x = key(a), y = key(b), apart = Boolean(D.settings[a].caveat) - Boolean(D.settings[b].caveat);
      if (figureOf(sort.key) && apart) return apart;  // what is no result never leads the table
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return sort.key && sort.down ? y - x : x - y;
    });
    const head = make("tr", {}, ...columns.map(([name, title]) => {
      const figure = figureOf(name);
      const order = sort.key === name ? (sort.down ? "descending" : "ascending") : null;
      const button = make("button", { type: "button", text: title + (order ? (sort.down ? " ▼" : " ▲") : ""), title: figure ? figure.meaning : null,
        onclick: () => { sort = { key: name, down: sort.key === name ? !sort.down : true }; tabled(); document.querySelector(`#settings th[data-name="${name}"] button`).focus(); } });
      return make("th", { scope: "col", "aria-sort": order, "data-name": name }, button);
    }));
    const body = settingOrder.map((n) => {
      const entry = D.settings[n];
      const button = make("button", { type: "button", text: entry.name, onclick: () => go({ setting: n }) });
      const star = front.has(n) ? make("span", { title: "on the front of gain against risk", text: " ★" }) : "";
      const row = make("tr", { "data-setting": n, class: (n === state.setting ? "chosen " : "") + (entry.caveat ? "partial" : ""), "aria-current": n === state.setting ? "true" : null },
        make("th", { scope: "row" }, button, star), make("td", { text: Math.min(entry.exact, entry.exact < 1 ? 0.99 : 1).toFixed(2) }));
      for (const figure of D.figures) {
        const values = entry.figures[figure.name];
        const cell = make("td", { text: values ? (entry.caveat ? "~" : "") + shownValue(figure, values[0]) : "–", title: values && entry.caveat ? entry.caveat : null });
        if (values && values[1] !== null) cell.append(make("span", { class: "interval", text: ` [${shownValue(figure, values[1])}, ${shownValue(figure, values[2])}]` }));
        row.append(cell);
      }
      return row;
    });
    $("settings").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
    $("setting-count").textContent = `${settingOrder.length} of ${D.settings.length} settings`;
    scattered(front);
  };
  const scattered = (front) => {
    const svg = $("scatter"), risk = $("risk").value, gain = gainName(), x = figureOf(risk), y = figureOf(gain);
    const title = $("scatter-title");
    svg.replaceChildren(title);
    if (!x || !y) return;
    const rows = D.settings.map((entry, n) => [n, value(entry, risk) * x.factor, value(entry, gain) * y.factor]).filter((row) => !D.settings[row[0]].caveat && row.slice(1).every(Number.isFinite));
    title.textContent = `${y.head} against ${x.head}, ${rows.length} exact settings`;
    if (!rows.length) return;
    const top = Math.max(...rows.map((row) => row[1])), accuracy = risk === "accuracy";
    const [xl, xh] = accuracy ? [top, Math.min(...rows.map((row) => row[1]))] : [0, top || 1];
    const ys = rows.map((row) => row[2]), pad = (Math.max(...ys) - Math.min(...ys)) * 0.08 || 0.1;
    const yl = Math.min(...ys) - pad, yh = Math.max(...ys) + pad;
    const px = (v) => 48 + ((v - xl) / (xh - xl || 1)) * 355, py = (v) => 258 - ((v - yl) / (yh - yl)) * 245;
    svg.append(draw("path", { class: "axis", d: "M48 10V258H408" }));
    for (let i = 0; i <= 4; i++) {
      const v = yl + ((yh - yl) * i) / 4, u = xl + ((xh - xl) * i) / 4;
      svg.append(draw("text", { x: 44, y: py(v) + 3, "text-anchor": "end" }, v.toFixed(2)));
      svg.append(draw("text", { x: px(u), y: 273, "text-anchor": "middle" }, u.toPrecision(2)));
    }
    svg.append(draw("text", { x: 228, y: 292, "text-anchor": "middle" }, `${x.head}${x.unit && " (" + x.unit + ")"}${accuracy ? ", falling" : ""}`));
    svg.append(draw("text", { x: 52, y: 16 }, y.head));
    const path = rows.filter((row) => front.has(row[0])).sort((a, b) => px(a[1]) - px(b[1]));
    if (path.length > 1) svg.append(draw("path", { class: "frontline", d: path.map((row, i) => (i ? `H${px(row[1])}V${py(row[2])}` : `M${px(row[1])} ${py(row[2])}`)).join("") }));
    rows.sort((a, b) => (a[0] === state.setting) - (b[0] === state.setting));
    for (const [n, u, v] of rows) {
      const dot = draw("circle", { class: "dot" + (front.has(n) ? " front" : "") + (n === state.setting ? " chosen" : ""), cx: px(u), cy: py(v), r: n === state.setting ? 5.5 : 3.4 });
      dot.append(draw("title", {}, D.settings[n].name));
      dot.addEventListener("click", () => go({ setting: n }));
      svg.append(dot);
    }
    $("scatter-caption").textContent = "Filled: on the front of gain against risk. Red: chosen. Exact settings only.";
  };

  // --- requests
  const requested = () => {
    const needle = $("request-filter").value.toLowerCase(), task = $("task").value;
    let unknown = 0;
    const rows = D.requests.map((request, r) => {
      const mine = walkOf(state.setting, r), base = walkOf(against, r);
      return { r, request, mine, base, place: partedAt(mine, base), output: outputOf(mine), known: outputOf(mine).known && outputOf(base).known };
    }).filter((row) => {
      if (task && row.request.task !== task) return false;
      if ($("changed").checked) {
        unknown += Boolean(row.request.scorer && !row.known);
        if (!row.request.scorer || !row.known || C.w_answer[row.mine] === C.w_answer[row.base]) return false;
      }
      return !needle || row.request.prompt.toLowerCase().includes(needle) || row.request.id.toLowerCase().includes(needle) || textOfWalk(row.mine).toLowerCase().includes(needle) || textOfWalk(row.base).toLowerCase().includes(needle);
    });
    if ($("by-regret").checked) rows.sort((a, b) => b.output.spent - a.output.spent || a.r - b.r);
    requestOrder = rows.map((row) => row.r);
    const verdict = (walk) => ["", "wrong", "right"][C.w_right[walk]];
    const head = ["request", "parts at token", "regret spent", "answer", "against", "prompt"].map((text, n) => make("th", { scope: "col", text, class: n > 4 ? "left" : null }));
    const body = rows.map(({ r, request, mine, base, place, output, known }) => make("tr", { class: r === state.request ? "chosen" : "", "data-request": r, "aria-current": r === state.request ? "true" : null },
      make("th", { scope: "row" }, make("button", { type: "button", text: escape(request.id), onclick: () => go({ request: r, step: -1 }) })),
      make("td", { text: place < 0 ? (known ? "same" : "not known") : String(place) }),
      make("td", { text: output.spent.toFixed(2) }),
      make("td", { text: [D.answers[C.w_answer[mine]], verdict(mine)].filter(Boolean).map((text) => escape(text).slice(0, 20)).join(" ") || "–" }),
      make("td", { text: [D.answers[C.w_answer[base]], verdict(base)].filter(Boolean).map((text) => escape(text).slice(0, 20)).join(" ") || "–" }),
      make("td", { class: "snippet", text: escape(request.prompt.slice(0, 90)) })));
    $("requests").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
    $("request-count").textContent = `${rows.length} of ${D.requests.length} requests${unknown ? `; ${unknown} more not known: their walks leave the trace` : ""}`;
  };

  // --- one request
  let steps = [];
  const tokenNode = (token, tag) => make(tag, { class: "t " + token.kind, type: tag === "button" ? "button" : null, "data-sign": SIGN[token.kind] },
    shown(token.word) + (token.kind === "relaxed" ? `[${shown(token.choice)}]` : ""));
  const outputNodes = (list, from) => {
    const nodes = [];
    let count = 0;
    for (const step of list) for (const token of step.tokens) {
      if (!["exact", "relaxed", "replacement", "bonus"].includes(token.kind)) continue;
      if (count++ < from) continue;
      const text = escape(pieceOf(token.word), "\n");
      nodes.push(token.kind === "relaxed" ? make("span", { class: "relaxed", title: `the target chose ${shown(token.choice)}`, text }) : text);
    }
    return nodes;
  };
  const outputsShown = () => {
    const entry = D.settings[state.setting], base = D.settings[against];
    const mine = walkOf(state.setting, state.request), other = walkOf(against, state.request), place = partedAt(mine, other);
    const panel = $("outputs"), children = [];
    const cut = place < 0 ? outputOf(mine).words.length : place;
    const shared = textOf(outputOf(mine).words.slice(0, cut));
    const same = place < 0 ? (outputOf(mine).known && outputOf(other).known ? "Both outputs are the same:" : "The same as far as both are known:") : `The outputs part at token ${place}${place ? "; shared before:" : ""}`;
    children.push(make("div", { class: "shared" }, make("h3", { text: same }), make("div", { class: "output", text: escape(shared, "\n") })));
    if (place >= 0) for (const [setting, walk, shownEntry] of [[against, other, base], [state.setting, mine, entry]]) {
      const list = stepsOf(setting, walk), relaxed = list.reduce((sum, step) => sum + step.tokens.filter((token) => token.kind === "relaxed").length, 0);
      const right = ["", " · answer wrong", " · answer right"][C.w_right[walk]];
      children.push(make("div", {}, make("h3", { text: `${shownEntry.name}: ${outputOf(walk).words.length} tokens, ${relaxed} relaxed, spent ${outputOf(walk).spent.toFixed(2)}${right}` }),
        make("div", { class: "output" }, ...outputNodes(list, place))));
    }
    panel.replaceChildren(...children);
  };
  const stripped = () => {
    const entry = D.settings[state.setting], walk = walkOf(state.setting, state.request), B = number(entry.B);
    steps = stepsOf(state.setting, walk);
    const limit = Number.isFinite(B) && B > 0 ? B : Math.max(outputOf(walk).spent, 1e-9);
    const rows = [];
    steps.forEach((step, n) => {
      if ($("relaxed-only").checked && !step.tokens.some((token) => token.kind === "relaxed")) return;
      const fill = make("i");
      fill.style.width = `${Math.min(100, (100 * step.after) / limit)}%`;
      const tokens = step.tokens.map((token, t) => {
        const node = tokenNode(token, "button");
        node.dataset.step = n;
        node.dataset.token = t;
        node.tabIndex = -1;
        const more = token.kind === "relaxed" ? `, the target chose ${shown(token.choice)}, regret ${token.regret.toFixed(2)}` : "";
        node.setAttribute("aria-label", `${node.lastChild.textContent}, ${SHORT[token.kind]}${more}`);
        return node;
      });
      rows.push(make("li", { class: "step" + (step.id === state.step ? " chosen" : ""), "data-step": n },
        make("div", { class: "facts" },
          make("button", { type: "button", text: `step ${step.id}`, onclick: () => go({ step: step.id }) }), make("span", { text: `at ${step.start}` }),
          make("span", { class: "gauge", "aria-hidden": "true" }, fill), make("span", { class: "ledger", text: `${step.spent.toFixed(2)} → ${step.after.toFixed(2)}` }),
          make("span", { class: "reason", text: reason(entry, step) }), make("span", { text: step.guess ? "estimated" : step.wave ? "covered" : "captured" })),
        make("div", { class: "tokens", role: "group", "aria-label": `tokens of step ${step.id}` }, ...tokens)));
    });
    $("strips").replaceChildren(...rows);
    const first = $("strips").querySelector(".t");
    if (first) first.tabIndex = 0;
    const kinds = { captured: 0, covered: 0, estimated: 0 };
    for (const step of steps) kinds[step.guess ? "estimated" : step.wave ? "covered" : "captured"]++;
    $("walk-facts").textContent = `${escape(D.requests[state.request].id)} · ${entry.name} · ${steps.length} steps (${Object.entries(kinds).filter((pair) => pair[1]).map((pair) => `${pair[1]} ${pair[0]}`).join(", ")}) · ${outputOf(walk).words.length} tokens · spent ${outputOf(walk).spent.toFixed(2)}`;
  };
  const ledgerLine = (entry) => {
    const svg = draw("svg", { id: "ledger", viewBox: "0 0 300 56", role: "img", "aria-label": "Ledger over the output" });
    const B = number(entry.B), last = steps.length ? steps[steps.length - 1] : null;
    if (!last) return svg;
    const length = Math.max(1, last.start + 1), top = Math.max(last.after, Number.isFinite(B) ? B : 0, 1e-9);
    const y = (v) => 50 - (44 * v) / top, x = (v) => 4 + (292 * v) / length;
    let d = `M${x(0)} ${y(0)}`;
    for (const step of steps) d += `H${x(step.start)}V${y(step.after)}`;
    svg.append(draw("path", { d: d + `H${x(length)}` }));
    if (Number.isFinite(B) && B > 0) svg.append(draw("line", { x1: 4, x2: 296, y1: y(B), y2: y(B) }), draw("text", { x: 296, y: y(B) + 10, "text-anchor": "end" }, `B = ${B}`));
    return svg;
  };
  const detailed = (n, t) => {
    const entry = D.settings[state.setting], panel = $("detail");
    if (n === null || !steps[n] || !steps[n].tokens[t]) {
      panel.replaceChildren(make("p", { text: "Hover or focus a token to see what the target thought of it." }), ledgerLine(entry));
      return;
    }
    const step = steps[n], token = step.tokens[t], facts = [];
    const fact = (name, text) => facts.push(make("dt", { text: name }), make("dd", { text }));
    fact("draft", token.row < posStart[posStart.length - 1] && ["bonus"].includes(token.kind) ? "–" : shown(C.p_draft[token.row]));
    fact("target's choice", shown(token.choice));
    if (token.regret !== undefined) {
      fact("regret r", token.regret > 1e30 ? "forbidden" : token.regret.toFixed(4));
      if (entry.rule === "asd" && token.score > 0) fact("suffix value q", (token.regret / token.score).toPrecision(3));
      fact(entry.rule === "asd" ? "r/q against g" : `score against ${entry.rule}`, Number.isFinite(token.score) ? `${token.score.toFixed(4)} against ${entry.g}` : "refused whatever the limit");
    }
    if (token.kind === "relaxed") fact("ledger", `${token.before.toFixed(4)} → ${token.after.toFixed(4)} of ${entry.B}`);
    else fact("ledger", `${step.spent.toFixed(4)} → ${step.after.toFixed(4)} of ${entry.B}`);
    if (token.kind === "rejected") fact("refused by", reason(entry, step));
    const bars = [];
    let below = 0;
    for (let rank = 0; rank < D.topK; rank++) {
      const cell = (rank - 1) * C.p_draft.length + token.row;
      if (rank > 0 && C.t_gap[cell] === 0 && C.t_id[cell] === 0) continue;  // too small to be kept
      below += rank > 0 ? C.t_gap[cell] / D.gapUnit : 0;
      const word = rank > 0 ? C.t_id[cell] : C.p_choice[token.row], p = (C.p_top[token.row] / 65535) * Math.exp(-below);
      const full = make("span", { class: "full" });
      full.style.width = `${Math.max(0.5, 100 * p)}%`;
      const mark = (word === C.p_choice[token.row] ? "y " : "  ") + (word === C.p_draft[token.row] && !["bonus"].includes(token.kind) ? "x " : "  ");
      bars.push(make("li", {}, make("span", { class: "word", text: mark + shown(word) }), make("span", {}, full), make("span", { class: "number", text: `${(100 * p).toFixed(1)} %` })));
    }
    panel.replaceChildren(make("h3", { text: shown(token.word) }), make("p", { text: `${SHORT[token.kind]}: ${WORDS[token.kind]}` }), make("dl", {}, ...facts),
      make("p", { text: `The target's ${D.topK} best at position ${token.i + 1}, those below 0.1 % left out (y: its choice, x: the draft)` }), make("ol", { class: "candidates" }, ...bars), ledgerLine(entry));
  };

  // --- where we are: the address names the choice, and the history of the browser goes through choices
  const hashOf = (next) => "#" + [D.settings[next.setting].name, D.requests[next.request].id, ...(next.step >= 0 ? [String(next.step)] : [])].map(encodeURIComponent).join("/");
  const go = (change, replace = false) => {
    const next = { ...state, ...change };
    if (change.setting !== undefined && change.step === undefined) next.step = -1;
    const hash = hashOf(next);
    if (hash === location.hash) apply();
    else if (replace) location.replace(hash);
    else location.hash = hash;
  };
  const apply = () => {
    let parts;
    try { parts = location.hash.slice(1).split("/").map(decodeURIComponent); } catch (_) { parts = []; }
    const setting = D.settings.findIndex((entry) => entry.name === parts[0]), request = D.requests.findIndex((entry) => entry.id === parts[1]);
    state = { setting: setting < 0 ? D.start : setting, request: request < 0 ? 0 : request, step: /^\d+$/.test(parts[2] || "") ? Number(parts[2]) : -1 };
    fixed = null;
    $("verdict").textContent = D.settings[state.setting].verdict;
    tabled();
    requested();
    $("prompt-text").textContent = escape(D.requests[state.request].prompt, "\n");
    outputsShown();
    stripped();
    const chosen = $("strips").querySelector(".chosen");
    detailed(null);
    if (chosen) {
      chosen.scrollIntoView({ block: "center" });
      const token = chosen.querySelector(".relaxed, .rejected, .t");
      if (token) detailed(Number(token.dataset.step), Number(token.dataset.token));
    }
    document.querySelectorAll("#settings tr.chosen, #requests tr.chosen").forEach((row) => {
      const box = row.closest(".scroll");
      if (row.offsetTop < box.scrollTop + 30 || row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = row.offsetTop - box.clientHeight / 2;
    });
  };
  const moved = (list, current, by) => list[Math.max(0, Math.min(list.length - 1, list.indexOf(current) + by))];

  const listen = () => {
    addEventListener("hashchange", apply);
    for (const id of ["setting-filter", "front-only", "risk"]) $(id).addEventListener("input", tabled);
    for (const id of ["request-filter", "task", "changed", "by-regret"]) $(id).addEventListener("input", requested);
    $("against").addEventListener("input", () => { against = Number($("against").value); requested(); outputsShown(); });
    $("relaxed-only").addEventListener("input", () => { stripped(); detailed(null); });
    const step = (by) => requestOrder.length && go({ request: moved(requestOrder, state.request, by), step: -1 });
    $("previous").addEventListener("click", () => step(-1));
    $("next").addEventListener("click", () => step(1));
    const look = (event) => {
      const token = event.target.closest("button.t");
      if (token) detailed(Number(token.dataset.step), Number(token.dataset.token));
    };
    $("strips").addEventListener("mouseover", (event) => fixed || look(event));
    $("strips").addEventListener("focusin", look);
    $("strips").addEventListener("click", (event) => {
      const token = event.target.closest("button.t");
      if (!token) return;
      document.querySelectorAll(".fixed").forEach((other) => other.classList.remove("fixed"));
      fixed = fixed === token ? null : token;
      if (fixed) fixed.classList.add("fixed");
      look(event);
    });
    $("strips").addEventListener("keydown", (event) => {
      const token = event.target.closest("button.t");
      if (!token) return;
      const all = [...$("strips").querySelectorAll("button.t")], row = token.closest(".step");
      const sideways = { ArrowRight: 1, ArrowLeft: -1 }[event.key], across = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling };
      let next = null;
      if (sideways) next = all[all.indexOf(token) + sideways];
      else if (event.key in across) next = across[event.key] && (across[event.key].querySelectorAll(".t")[[...row.querySelectorAll(".t")].indexOf(token)] || across[event.key].querySelector(".t:last-child"));
      else if (event.key === "Enter") { event.preventDefault(); go({ step: steps[Number(token.dataset.step)].id }, true); return; }
      else return;
      event.preventDefault();
      if (next) { token.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    });
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
      else if (event.key === "]" || event.key === "[") settingOrder.length && go({ setting: moved(settingOrder, state.setting, event.key === "]" ? 1 : -1) });
    });
  };
  const fill = () => {
    const risks = D.figures.filter((figure) => ["regret_per_token", "regret_spent_mean", "outputs_differ_share", "edit_distance_mean", "accuracy"].includes(figure.name));
    $("risk").append(...risks.map((figure) => make("option", { value: figure.name, text: figure.head })));
    $("task").append(make("option", { value: "", text: "all" }), ...[...new Set(D.requests.map((request) => request.task))].map((task) => make("option", { value: task, text: escape(task) })));
    $("against").append(...D.settings.map((entry, n) => make("option", { value: n, text: entry.name })));
    $("legend").append(...Object.keys(SIGN).map((kind) => make("li", {}, make("span", { class: "t " + kind, title: WORDS[kind], "data-sign": SIGN[kind] }, SHORT[kind] + (kind === "relaxed" ? "[target's]" : "")))));
    $("definitions").append(...D.figures.flatMap((figure) => [make("dt", { text: figure.head }), make("dd", { text: figure.meaning })]),
      make("dt", { text: "exact" }), make("dd", { text: "share of requests whose walk met recorded steps only; a setting below 1 is no result" }),
      make("dt", { text: "~ before a figure" }), make("dd", { text: "the setting is not exact: the figure is no result; where walks stop off the trace it is that of a biased sample, which cannot be compared with strict matching" }),
      make("dt", { text: "captured, covered, estimated" }), make("dd", { text: "met while the trace was recorded; added by asdsim cover; a guess behind the recorded steps" }));
  };
  const unpack = async () => {
    const text = atob($("blob").textContent), raw = new Uint8Array(text.length);
    for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    for (const [name, [type, offset, length]] of Object.entries(D.columns)) C[name] = new ARRAYS[type](buffer, offset, length);
    posStart = new Uint32Array(C.s_k.length + 1);
    for (let step = 0; step < C.s_k.length; step++) posStart[step + 1] = posStart[step] + C.s_k[step] + 1;
  };
  unpack().then(() => {
    fill();
    listen();
    $("app").hidden = false;
    apply();
    document.documentElement.dataset.ready = "yes";
  }).catch((error) => {
    document.documentElement.dataset.ready = "failed";
    $("verdict").append(make("strong", { text: ` This browser cannot open the tokens of the page: ${error.message}.` }));
  });
})();
