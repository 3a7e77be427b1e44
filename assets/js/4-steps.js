// The selected step of every lane: tree, table or mask, the chosen node in words, and where the step's time went.
draftscope.views.steps = (root) => {
  "use strict";
  const { state, make, term, visible, pieces, tokenText, probability, ms, total, put, select, stepOf, emit, tree } = draftscope;
  const PHASES = ["draft", "verify", "accept", "commit", "record"];
  const BLANK = {
    waiting: "Its trees are drawn here when its turn comes.",
    loading: "Loading and warming up.",
    running: "Reading the prompt …",
    stopped: "Stopped before its first step.",
    failed: "No step was made.",
  };
  const rows = new Map();
  let session = null,
    all = true;

  const choice = (name, options, change) =>
    make(
      "div.ds-choice",
      { role: "radiogroup", "aria-label": name },
      options.map(([value, words], index) =>
        make(
          "label",
          null,
          make("input", {
            type: "radio",
            name: `ds-${name.replace(/\W/g, "")}`,
            value,
            checked: index === 0,
            onchange: () => change(value),
          }),
          make("span", null, words),
        ),
      ),
    );
  const zoom = (words, name, by) =>
    make(
      "button.ds-button",
      {
        type: "button",
        "aria-label": name,
        onclick: () => ((state.zoom = by ? Math.min(1.8, Math.max(0.6, state.zoom * by)) : 1), emit("look")),
      },
      words,
    );
  const tools = make(
    "div.ds-tools",
    null,
    choice(
      "Show the step as",
      [
        ["tree", "Tree"],
        ["table", "Table"],
      ],
      (value) => ((state.look = value), emit("look")),
    ),
    make(
      "label.ds-check",
      null,
      make("input", { type: "checkbox", checked: true, onchange: (event) => ((all = event.target.checked), emit("look")) }),
      "unreached nodes",
    ),
    make(
      "label.ds-check",
      null,
      make("input", { type: "checkbox", onchange: (event) => ((state.mask = event.target.checked), emit("look")) }),
      "attention mask",
    ),
    make(
      "label.ds-check",
      null,
      make("input", { type: "checkbox", onchange: (event) => ((state.beside = event.target.checked), emit("look")) }),
      "side by side",
    ),
    make(
      "div.ds-zoom",
      { role: "group", "aria-label": "Size of the trees" },
      zoom("−", "Smaller", 1 / 1.2),
      zoom("1:1", "Original size", 0),
      zoom("+", "Larger", 1.2),
    ),
    make(
      "div.ds-legend",
      null,
      ...[
        ["a", "✓ ", "accepted"],
        ["r", "× ", "rejected"],
        ["u", "", "unreached"],
        ["bonus", "+ ", "bonus token"],
      ].map(([kind, sign, name]) =>
        make("span.ds-key", null, make(`span.ds-mark.is-${kind}`, { "aria-hidden": "true" }, sign.trim() || " "), term(name)),
      ),
      make("span.ds-key", null, make("span.ds-bar.q"), term("draft p")),
      make("span.ds-key", null, make("span.ds-bar.p"), term("target p")),
    ),
  );
  const list = make("div.ds-steps");
  root.append(tools, list);

  function row(lane) {
    const heading = make("h3"),
      words = make("p.ds-summary"),
      scroll = make("div.ds-scroll", { tabindex: 0, role: "region", "aria-label": `Draft tree of ${lane.label}` }),
      masked = make("div.ds-masked", { hidden: true }),
      detail = make("div.ds-detail"),
      time = make("div.ds-time");
    const box = make(
      "section.ds-step",
      { "data-method": lane.method },
      make(
        "header",
        null,
        make("span.ds-swatch", { "aria-hidden": "true" }),
        heading,
        // on a phone only the selected lane is open
        make("button.ds-button.ds-open", { type: "button", onclick: () => open(lane.key) }, "Open"),
        words,
      ),
      make("div.ds-body", null, make("div.ds-pictures", null, scroll, masked), make("aside", { "aria-label": `Selected node of ${lane.label}` }, detail, time)),
    );
    scroll.addEventListener("click", (event) => {
      const hit = event.target.closest("[data-node]");
      if (hit && state.look === "tree") choose(lane.key, hit.dataset.node);
    });
    scroll.addEventListener("keydown", (event) => walk(event, lane.key));
    list.append(box);
    return { box, heading, words, scroll, masked, detail, time, node: null, at: null, drawn: null, timed: null, maskDrawn: "" };
  }

  function open(key) {
    const lane = draftscope.lane(key);
    select(key, stepOf(lane), null, state.place);
  }

  const asNode = (text) => (text === "bonus" ? "bonus" : Number(text));

  function choose(key, node, focus) {
    const lane = draftscope.lane(key),
      own = rows.get(key),
      index = stepOf(lane);
    own.node = { step: index, node: asNode(node) };
    select(key, index, own.node.node, lane.starts[index]);
    if (focus) own.scroll.querySelector('[aria-selected="true"], [aria-pressed="true"]')?.focus();
  }

  // Arrow keys inside a tree: right to the best child, left to the parent, up and down through the nodes as drawn.
  function walk(event, key) {
    const keys = ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"];
    if (!keys.includes(event.key)) return;
    const own = rows.get(key);
    const lane = draftscope.lane(key);
    const step = lane.steps[stepOf(lane)];
    const drawn = [...own.scroll.querySelectorAll("[data-node]")].map((node) => node.dataset.node);
    const now = String(current(own, lane, step));
    const place = drawn.indexOf(now);
    const next = { ArrowUp: drawn[place - 1], ArrowDown: drawn[place + 1], Home: drawn[0], End: drawn[drawn.length - 1] };
    if (state.look === "tree") {
      const child = step.up.findIndex((up, node) => String(up) === now && drawn.includes(String(node)));
      next.ArrowLeft = String(now === "bonus" ? tree.end(step) : now === "-1" ? -1 : step.up[now]);
      next.ArrowRight = child >= 0 ? String(child) : now === String(tree.end(step)) ? "bonus" : now;
    }
    event.preventDefault();
    if (next[event.key] !== undefined) choose(key, next[event.key], true);
  }

  // The node whose detail is shown: the chosen one, else the one that tells why acceptance ended.
  function current(own, lane, step) {
    const index = stepOf(lane);
    if (state.focus === lane.key && state.node !== null && state.step === index) return state.node;
    if (own.node && own.node.step === index) return own.node.node;
    const refused = step.up.findIndex((up, node) => up === tree.end(step) && step.mark[node] === "r");
    return refused >= 0 ? refused : "bonus";
  }

  function detail(lane, step, form, node) {
    const id = node === -1 ? step.root : node === "bonus" ? step.bonus : step.ids[node];
    const text = tokenText(lane, id),
      real = typeof node === "number" && node >= 0;
    const kind = node === -1 ? "root" : node === "bonus" ? "bonus" : step.mark[node];
    const facts = real
      ? [
          ["depth", form.depth[node]],
          ["rank", `${form.rank[node]} of ${form.children.get(step.up[node]).length}`],
          ["draft p", probability(step.q[node])],
          ["target p", probability(step.p[node])],
          ["path p", probability(form.sure[node])],
          ...(step.draw && step.draw[node] !== null ? [["draw", probability(step.draw[node])]] : []),
        ]
      : [["depth", node === -1 ? 0 : step.path.length + 1]];
    if (node === "bonus" && step.gap)
      facts.push(
        ["runner-up", `“${visible(tokenText(lane, step.second[step.path.length]), 16)}”`],
        ["logit gap", step.gap[step.path.length].toFixed(2)],
      );
    facts.push(["token id", id]);
    return [
      make(
        "div.ds-detail-head",
        null,
        make(
          `span.ds-mark.is-${kind}`,
          null,
          node === -1 ? "● root" : node === "bonus" ? "+ bonus token" : `${{ a: "✓", r: "×", u: "" }[kind]} ${tree.STATUS[kind]}`,
        ),
        make("span.ds-big", null, pieces(text, 60)),
      ),
      make("p", null, tree.decision(lane, step, form, node)),
      make(
        "dl",
        null,
        facts.map(([name, value]) => make("div", null, make("dt", null, term(name)), make("dd", null, String(value)))),
      ),
    ];
  }

  // Bars of all lanes share one scale: the longest of the shown steps.
  function time(step, top) {
    const parts = step.ms.map((value, phase) =>
      make(`span.ds-time-part.ds-phase-${PHASES[phase]}`, {
        style: `width:${((100 * value) / top).toFixed(2)}%`,
        title: `${PHASES[phase]} ${ms(value)} ms`,
      }),
    );
    const words = step.ms
      .map((value, phase) => [PHASES[phase], value])
      .filter(([, value]) => value > 0.005)
      .map(([name, value]) => `${name} ${ms(value)}`)
      .join(" · ");
    const per = total(step) / Math.max(1, step.out);
    return [
      make("div.ds-time-bar", { "aria-hidden": "true" }, parts),
      make(
        "p.ds-time-words",
        null,
        `${ms(total(step))} ms: ${words}. For ${step.out} token${step.out === 1 ? "" : "s"}: ${ms(per)} ms each.`,
      ),
    ];
  }

  function update() {
    if (session !== state.session || state.lanes.length !== rows.size) {
      session = state.session;
      rows.clear();
      list.replaceChildren();
      for (const lane of state.lanes) rows.set(lane.key, row(lane));
    }
    list.dataset.beside = state.beside;
    list.dataset.heads = state.lanes.filter((lane) => lane.tree || lane.method !== "autoregressive").length;
    const shown = [];
    for (const lane of state.lanes) {
      const own = rows.get(lane.key);
      own.box.dataset.method = lane.method;
      own.box.dataset.focus = lane.key === state.focus;
      own.box.dataset.plain = lane.method === "autoregressive";
      own.scroll.parentNode.hidden = lane.method === "autoregressive";
      own.masked.hidden = !state.mask;
      if (lane.tree) own.box.style.setProperty("--tree", `${tree.room(lane.tree[2])}px`);
      if (!lane.steps.length) blank(lane, own);
      else shown.push({ lane, own, index: stepOf(lane) });
    }
    shown.forEach(drawMask); // takes its place beside the tree before the tree's own is measured
    // measure everything, then draw everything, then scroll: two layouts, however many lanes there are
    const seen = shown.map(({ own }) => ({
      width: own.scroll.clientWidth,
      height: own.scroll.clientHeight,
      at: own.scroll.scrollTop,
    }));
    const top = Math.max(1e-9, ...shown.map(({ lane, index }) => total(lane.steps[index])));
    shown.forEach((part, nth) => drawRow(part, top, seen[nth]));
    shown.forEach(({ own, index }, nth) => {
      const place = `${index}/${state.look}/${state.zoom}`;
      const wanted = own.at === place ? seen[nth].at : 0;
      own.at = place;
      if (wanted !== seen[nth].at || wanted) own.scroll.scrollTop = wanted;
    });
  }

  // Before the first step the row keeps its place, so that nothing jumps when the step arrives.
  function blank(lane, own) {
    if (own.drawn === lane.state) return;
    put(own.heading, lane.label);
    put(own.words, "");
    for (const part of [own.masked, own.detail, own.time]) part.replaceChildren();
    own.scroll.replaceChildren(make("p.ds-placeholder", null, BLANK[lane.state] || ""));
    own.at = null;
    own.drawn = lane.state;
    own.timed = own.maskDrawn = "";
  }

  function drawMask({ lane, own, index }) {
    const step = lane.steps[index],
      node = state.mask && lane.tree ? current(own, lane, step) : null,
      drawn = state.mask && lane.tree ? `${index}/${node}/${lane.state}` : "";
    if (own.maskDrawn === drawn) return;
    own.maskDrawn = drawn;
    own.masked.replaceChildren(...(drawn ? [tree.mask(lane, step, node, tree.room(lane.tree[2]))] : []));
  }

  // A streamed update redraws the lane that moved, and no other.
  function drawRow({ lane, own, index }, top, { width, height }) {
    const step = lane.steps[index];
    const node = current(own, lane, step);
    put(own.heading, `${lane.label} · step ${index + 1} of ${lane.steps.length}`);
    if (own.timed !== `${index}/${top}`) {
      own.timed = `${index}/${top}`;
      own.time.replaceChildren(...time(step, top));
    }
    const drawn = [index, node, lane.state, width, height, all, state.look, state.zoom].join();
    if (own.drawn === drawn) return;
    own.drawn = drawn;
    const form = tree.shape(step);
    put(own.words, tree.summary(lane, step, form));
    own.detail.replaceChildren(...(lane.tree ? detail(lane, step, form, node) : []));
    if (!lane.tree || !width) return;
    const pick = (picked) => choose(lane.key, picked, true);
    if (state.look === "table") own.scroll.replaceChildren(tree.table(lane, step, form, node, pick));
    else own.scroll.replaceChildren(tree.draw(lane, step, { all, width, height, zoom: state.zoom, node }).svg);
  }

  // Redraws where the width changed, and when the tab comes into view (its width was 0).
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 8) return;
    width = entry.contentRect.width;
    if (state.info && width) update();
  }).observe(root);
  return () => state.info && (width || root.clientWidth) && update();
};
