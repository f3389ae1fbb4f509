"use strict";
(function () {
  const data = JSON.parse(document.getElementById("page-data").textContent);

  function element(tag, attributes, text) {
    const node = document.createElement(tag);
    for (const name in attributes || {}) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // As numbers.py writes them.
  function number(value, digits) {
    if (value === null) return "\u2013";
    const size = Math.abs(value), whole = Number.isInteger(size) && size < 1e15;
    const text = whole || size >= 10 ** digits && size < 1e6
      ? size.toLocaleString("en", { maximumFractionDigits: 0 })
      : size >= 1e-3 && size < 1e6
        ? String(+size.toPrecision(digits))
        : size.toExponential(digits - 1).replace(/e([+-])(\d)$/, "e$10$2");
    return (value < 0 ? "\u2212" : "") + text;
  }

  function signed(value) {
    return (value > 0 ? "+" : "") + number(value, 3);
  }

  // Where an arrow key leads from a place in a row of so many; null for another key.
  function moved(event, place, count) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -count, End: count };
    if (!(event.key in steps)) return null;
    event.preventDefault();
    return Math.max(0, Math.min(count - 1, place + steps[event.key]));
  }

  // --- values over the text ------------------------------------------------------------------

  const tip = document.getElementById("tip"), views = [];
  const state = { component: "", byRow: false };

  // Over the page's own colour, so that it follows the light, and paper; by the rule of
  // support/coloured.py.
  function colour(value, scale) {
    if (!scale || !value) return "";
    const strength = Math.sqrt(Math.min(1, Math.abs(value) / scale));
    return "rgba(var(" + (value > 0 ? "--plus" : "--minus") + "), " + strength.toFixed(3) + ")";
  }

  // What the selection does with a token; "" where none is shown.
  function fate(example, index) {
    if (!data.selection || !example.kept) return "";
    return example.kept[index] === "1" ? "kept" : "dropped";
  }

  const fated = (span) => span.fate && ", " + span.fate;

  // Text that is not valued: one line of it, and all of it when it is opened.
  function prompt(text, brief) {
    const node = element("details", { class: "prompt" });
    node.append(element("summary", {}, brief || "\u2026"), element("div", {}, text));
    return node;
  }

  // An example as a card in an element; "list" has key, scale and unit of its own, if any.
  function build(parent, example, list) {
    const card = element("section", { class: "example", "aria-label": example.place });
    const title = element("h4", {}, example.place);
    title.append(element("span", {}, example.said));
    const text = element("div", { class: "text", dir: "auto" });
    const spans = [];
    let unvalued = "", stretch = 0;
    const close = function (last) {
      const brief = example.briefs[stretch];
      if (unvalued && (brief || !last)) text.append(prompt(unvalued, brief));
      stretch += unvalued ? 1 : 0;
      unvalued = "";
    };
    example.tokens.forEach(function (token, index) {
      if (example.response[index] !== "1") { unvalued += token; return; }
      close(false);
      const chosen = fate(example, index);
      const span = element("span", {
        class: ("tok " + chosen).trim(), role: "button", tabindex: spans.length ? "-1" : "0",
        "data-place": example.start + index,
      }, token);
      Object.assign(span, { fate: chosen, view: views.length, order: spans.length });
      spans.push(span);
      text.append(span);
    });
    close(true);
    card.append(title, text);
    parent.append(card);
    const view = { card, example, list, spans };
    views.push(view);
    return view;
  }

  const shownKey = (view) => view.list ? view.list.key : state.component;
  const scaleOf = (view) => view.list ? view.list.full : data.scales[state.component];

  function paint(view) {
    const values = view.example.values[shownKey(view)] || [];
    const scale = state.byRow ? Math.max(0, ...values.map(Math.abs)) : scaleOf(view);
    view.spans.forEach(function (span, index) {
      span.style.backgroundColor = colour(values[index], scale);
      span.setAttribute("aria-label",
        span.textContent + ": " + signed(values[index] || 0) + fated(span));
    });
  }

  function paintAll() {
    views.forEach(paint);
    for (const node of document.querySelectorAll(".scale:not([data-own])")) {
      const full = state.byRow ? null : data.scales && data.scales[state.component];
      node.querySelector(".least").textContent =
        full ? "\u2212" + number(full, 3) + " or less" : "lowest";
      node.querySelector(".most").textContent = full ? "+" + number(full, 3) + " or more" : "highest";
    }
  }

  // --- the numbers of one token --------------------------------------------------------------

  const sorted = new Map();

  // Share of the tokens shown whose value is lower, in per cent.
  function rank(view, value) {
    const key = shownKey(view);
    if (!sorted.has(key)) {
      const own = views.filter((one) => view.list ? shownKey(one) === key : !one.end);
      sorted.set(key, Float64Array.from(own.flatMap((one) => one.example.values[shownKey(one)])).sort());
    }
    const every = sorted.get(key);
    let low = 0, high = every.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (every[middle] < value) low = middle + 1; else high = middle;
    }
    return every.length ? Math.round(100 * low / every.length) : 0;
  }

  // A loss, and the probability that it is of.
  function likely(loss) {
    const share = 100 * Math.exp(-Math.max(0, loss));
    const percent = share >= 0.1 ? number(+share.toPrecision(2), 2) : "below 0.1";
    return "loss " + number(loss, 3) + ", probability " + percent + "\u00a0%";
  }

  // The rows of a tooltip: name, what is said.
  function facts(view, order) {
    const example = view.example, own = shownKey(view), value = example.values[own][order];
    const page = view.list || data, unit = page.unit ? " " + page.unit : "";
    const alone = view.list || data.components.length === 1;
    const name = alone ? "value" : data.components.find((one) => one.key === own).name;
    const rows = [[name, signed(value) + unit, true]];
    if (page.rate && own === "total")
      rows.push(["a step of rate " + number(page.rate, 3), "moves the loss by " + signed(-page.rate * value)]);
    rows.push(["rank", "above " + rank(view, value) + "\u00a0% of the tokens"]);
    if (example.loss) {
      const before = example.loss[order], now = page.after ? "before" : "now";
      rows.push([now, likely(before)]);
      if (page.after) rows.push([page.after, likely(before - (example.values.total || example.values[own])[order])]);
    }
    for (const one of view.list ? [] : data.components)
      if (one.key !== own) rows.push([one.name, signed(example.values[one.key][order])]);
    return rows;
  }

  function showTip(span) {
    const view = views[span.view];
    const name = span.textContent.trim();
    const title = "\u201c" + (name.length > 60 ? name.slice(0, 60) + "\u2026" : name) + "\u201d";
    tip.replaceChildren(element("b", { dir: "auto" }, title),
      document.createTextNode(" token " + span.dataset.place + fated(span)));
    const table = element("table");
    for (const [left, right, now] of facts(view, span.order)) {
      const row = element("tr", now ? { class: "now" } : {});
      row.append(element("td", {}, left), element("td", {}, right));
      table.append(row);
    }
    tip.append(table);
    tip.hidden = false;
    const box = span.getClientRects()[0] || span.getBoundingClientRect();
    const high = tip.offsetHeight, wide = tip.offsetWidth;
    const top = box.bottom + 8 + high < window.innerHeight ? box.bottom + 8 : box.top - high - 8;
    tip.style.top = Math.max(4, top) + "px";
    tip.style.left = Math.max(4, Math.min(box.left, window.innerWidth - wide - 12)) + "px";
  }

  function move(span, event) {
    const spans = views[span.view].spans;
    if (event.key === "Escape") { tip.hidden = true; return; }
    const place = moved(event, span.order, spans.length);
    if (place === null) return;
    span.tabIndex = -1;
    spans[place].tabIndex = 0;
    spans[place].focus();
  }

  const token = (event) => event.target.closest ? event.target.closest(".tok") : null;
  document.addEventListener("mouseover", (event) => token(event) ? showTip(token(event)) : (tip.hidden = true));
  document.addEventListener("focusin", (event) => token(event) && showTip(token(event)));
  document.addEventListener("focusout", () => { tip.hidden = true; });
  document.addEventListener("click", (event) => token(event) && showTip(token(event)));
  document.addEventListener("keydown", (event) => token(event) && move(token(event), event));

  // --- what is drawn -------------------------------------------------------------------------

  // Rows of the list by a column of theirs: from the lowest, of losses and shares from the highest.
  function order(list, column) {
    const sign = column === "mean_loss" || column === "negative" ? -1 : 1;
    const last = Number.POSITIVE_INFINITY;  // a row without a response
    const key = (view) => view.example[column] ?? null;
    const place = (view) => key(view) === null ? last : sign * key(view);
    const own = views.filter((view) => !view.end && !view.list);
    own.sort((a, b) => place(a) - place(b) || a.example.row - b.example.row);
    list.append(...own.map((view) => view.card));
  }

  function choose(key) {
    const chosen = data.components.find((one) => one.key === key);
    if (!chosen) return;
    state.component = chosen.key;
    const meaning = document.getElementById("meaning");
    if (meaning) meaning.textContent = chosen.name + ": " + chosen.meaning + ".";
    paintAll();
  }

  const list = document.getElementById("examples");
  if (list) {
    for (const side in data.ends)
      for (const example of data.ends[side])
        build(document.getElementById(side), example).end = true;
    for (const example of data.examples) build(list, example);
    order(list, "mean");
    document.addEventListener("change", function (event) {
      const target = event.target;
      if (target.name === "component") choose(target.value);
      if (target.name === "order") order(list, target.value);
      if (target.id === "selection") document.body.classList.toggle("selected", target.checked);
      if (target.id === "by-row") { state.byRow = target.checked; paintAll(); }
    });
    choose(data.components[0].key);
  }
  for (const one of data.lists || [])
    for (const example of one.examples) build(document.getElementById(one.anchor), example, one);
  if (data.lists) paintAll();
})();
