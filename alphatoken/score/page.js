"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);

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

  // Examples as cards in an element: "components" to choose from, and an absolute value at which
  // colours saturate, or null for that of each row.
  function heatmaps(list, examples, components, saturation) {
    const tip = document.getElementById("tip");
    const theme = getComputedStyle(document.documentElement);
    const [PLUS, MINUS, PAPER] = ["--plus", "--minus", "--paper"].map(
      (name) => theme.getPropertyValue(name).split(",").map(Number));
    const state = { component: components.length ? components[0].key : "" };
    const views = [];

    function colour(value, scale) {
      if (!scale || !value) return "";
      // Signed root: a few large values would else leave all others, of either sign, white.
      const strength = Math.sqrt(Math.min(1, Math.abs(value) / scale));
      const end = value > 0 ? PLUS : MINUS;
      const mix = end.map((channel, i) => Math.round(PAPER[i] + (channel - PAPER[i]) * strength));
      return "rgb(" + mix.join(", ") + ")";
    }

    // What the selection does with a token; "" where none is shown.
    function fate(example, index) {
      return example.kept ? (example.kept[index] === "1" ? "kept" : "dropped") : "";
    }

    const fated = (span) => span.fate && ", " + span.fate;

    function build(example) {
      const card = element("section", { class: "example paper", "aria-label": example.place });
      const title = element("h3", {}, example.place);
      const of = example.tokens.length < example.length
        ? "tokens " + example.start + " to " + (example.start + example.tokens.length - 1) + " of " + example.length
        : example.length + " tokens";
      title.append(element("span", {}, example.said || of));
      const text = element("div", { class: "text", dir: "auto" });
      const spans = [];
      let prompt = "";
      example.tokens.forEach(function (token, index) {
        if (example.response[index] !== "1") { prompt += token; return; }
        if (prompt) { text.append(element("span", { class: "prompt" }, prompt)); prompt = ""; }
        const chosen = fate(example, index);
        const blank = token.replace(/\u21b5/g, "").trim() ? "" : " blank";
        const span = element("span", {
          class: "tok " + chosen + blank, role: "button", tabindex: spans.length ? "-1" : "0",
          "data-place": example.start + index,
        }, token);
        span.fate = chosen;
        span.view = views.length;
        span.order = spans.length;
        spans.push(span);
        text.append(span);
      });
      if (prompt) text.append(element("span", { class: "prompt" }, prompt));
      card.append(title, text);
      list.append(card);
      views.push({ example, spans });
    }

    function paint() {
      const key = state.component;
      for (const view of views) {
        const values = view.example.values[key] || [];
        const scale = saturation || Math.max(0, ...values.map(Math.abs));
        view.spans.forEach(function (span, index) {
          span.style.backgroundColor = colour(values[index], scale);
          span.setAttribute("aria-label",
            span.textContent + ": " + signed(values[index] || 0) + fated(span));
        });
      }
    }

    function showTip(span) {
      const view = views[span.view];
      const name = span.textContent.trim();
      const title = "\u201c" + (name.length > 60 ? name.slice(0, 60) + "\u2026" : name) + "\u201d";
      tip.replaceChildren(element("b", { dir: "auto" }, title),
        document.createTextNode(" token " + span.dataset.place + fated(span)));
      const table = element("table");
      for (const component of components) {
        const row = element("tr", component.key === state.component ? { class: "now" } : {});
        row.append(element("td", {}, component.name),
          element("td", {}, signed(view.example.values[component.key][span.order])));
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
    list.addEventListener("mouseover", (event) => token(event) ? showTip(token(event)) : (tip.hidden = true));
    list.addEventListener("mouseleave", () => { tip.hidden = true; });
    list.addEventListener("focusin", (event) => token(event) && showTip(token(event)));
    list.addEventListener("focusout", () => { tip.hidden = true; });
    list.addEventListener("click", (event) => token(event) && showTip(token(event)));
    list.addEventListener("keydown", (event) => token(event) && move(token(event), event));
    examples.forEach(build);
    paint();
    return function (component) {
      state.component = component.key;
      paint();
    };
  }

  const list = document.getElementById("examples");
  if (list) {
    const components = data.components, show = heatmaps(list, data.examples, components, null);
    const choose = function (key) {
      const chosen = components.find((one) => one.key === key);
      if (!chosen) return;
      show(chosen);
      document.getElementById("meaning").textContent = chosen.name + ": " + chosen.meaning + ".";
    };
    document.addEventListener("change",
      (event) => event.target.name === "component" && choose(event.target.value));
    if (components.length) choose(components[0].key);
  }
  for (const one of data.lists || [])
    heatmaps(document.getElementById(one.anchor), one.examples, [one.component], one.saturation);
})();
