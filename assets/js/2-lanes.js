// The lanes: figures, token chips by origin, latency strip, and the bar that moves through the steps.
draftscope.views.lanes = (root) => {
  "use strict";
  const { state, make, term, number, ms, total, select, stepOf, quoted, visible, pieces, tokenText, put } = draftscope;
  const KIND = { live: "Live run", recorded: "Recorded run", uploaded: "Uploaded run" };
  const STATE = {
    waiting: "waiting",
    loading: "loading",
    running: "running",
    done: "finished",
    stopped: "stopped",
    failed: "failed",
  };
  const ENDED = { stop: " · ended by itself", length: " · token limit", cancelled: " · stopped", error: " · failed" };
  const EMPTY = {
    waiting: "Its turn comes: the lanes run one after the other, so that none slows another.",
    loading: "Loading and warming up. The first run takes a few seconds longer.",
    running: "Reading the prompt …",
    stopped: "Stopped before its first token.",
    failed: "Nothing was made.",
  };
  const PHASES = ["draft", "verify", "accept", "commit", "record"];
  const cards = new Map();
  let session = null,
    noted = "";

  const badge = make("span.ds-kind");
  const title = make("span.ds-title"),
    where = make("span.ds-where");
  const copy = make("button.ds-button.ds-copy", { type: "button", hidden: true, onclick: copyLink }, "Copy link");
  const alert = make("div.ds-alert", { role: "alert", hidden: true });
  const verdict = make("div.ds-verdicts");
  const grid = make("div.ds-lanes");
  root.append(
    make("div.ds-banner", null, badge, title, copy, where),
    alert,
    verdict,
    grid,
    legend(),
    make("div.ds-sr", { id: "ds-status", role: "status" }),
  );

  function legend() {
    const chip = (kind, text, ...words) => make("span.ds-key", null, make(`span.ds-chip.${kind}`, null, text), ...words);
    return make(
      "div.ds-legend",
      { role: "note", "aria-label": "How tokens are marked" },
      chip("acc", "filled", "drafted by the head and accepted: the n-th of a step at depth n"),
      chip("bonus", "outlined", term("bonus token"), "ends the step"),
      chip("plain", "underlined", "plain decoding"),
      make("span.ds-key", null, make("span.ds-capsule.on", null, "framed"), "the selected step"),
      make("span.ds-key", null, make("span.ds-ws", null, "·"), "space"),
      make("span.ds-key", null, make("span.ds-ws", null, "⏎"), "new line"),
      make("span.ds-key", null, make("span.ds-byte", null, "E2"), "one byte of a character"),
    );
  }

  // ---- one lane ---------------------------------------------------------------------------------------------------
  function card(lane) {
    const figure = (name) => {
      const value = make("dd", null, "–");
      return [make("div.ds-figure", null, make("dt", null, term(name)), value), value];
    };
    const [speedBox, speed] = figure("speed-up");
    const [rateBox, rate] = figure("tokens/s");
    const [tauBox, tau] = figure("tau");
    const text = make("div.ds-text", {
      tabindex: 0,
      role: "group",
      "aria-label": `${lane.label}: tokens by step; arrow keys move through the steps`,
    });
    const strip = make("svg.ds-strip", { preserveAspectRatio: "none", "aria-hidden": "true" });
    const stripText = make("span.ds-strip-text"),
      state_ = make("span.ds-state"),
      equal = make("p.ds-equal"),
      heading = make("h2"),
      about = make("p.ds-about"),
      facts = make("p.ds-facts");
    const box = make(
      "article.ds-lane",
      { "data-method": lane.method },
      make("header", null, make("span.ds-swatch", { "aria-hidden": "true" }), heading, state_),
      make("div", null, about, facts),
      make("dl.ds-figures", null, speedBox, rateBox, tauBox),
      text,
      make("div.ds-strip-box", null, strip, stripText),
      equal,
    );
    text.addEventListener("click", (event) => {
      const chip = event.target.closest(".ds-chip");
      if (chip) pick(lane.key, Number(chip.dataset.step), Number(chip.dataset.place));
    });
    text.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const own = draftscope.lane(lane.key);
      select(lane.key, (state.focus === lane.key ? state.step : stepOf(own)) + moves[event.key]);
    });
    strip.addEventListener("click", (event) => {
      const own = draftscope.lane(lane.key),
        box_ = strip.getBoundingClientRect();
      select(lane.key, Math.floor(((event.clientX - box_.left) / box_.width) * own.steps.length));
    });
    const empty = make("span.ds-empty");
    text.append(empty);
    const now = make("rect.ds-now"),
      over = make("path.ds-over"),
      paths = PHASES.map((name) => make(`path.ds-phase-${name}`));
    strip.append(now, ...paths, over);
    grid.append(box);
    return {
      box,
      empty,
      now,
      over,
      high: [],
      paths,
      bars: PHASES.map(() => ""),
      barred: 0,
      picked: [],
      heading,
      about,
      facts,
      speed,
      rate,
      tau,
      text,
      strip,
      stripText,
      state: state_,
      equal,
      drawn: 0,
      first: false,
      capsules: [],
      marked: null,
    };
  }

  function pick(key, step, place) {
    const lane = draftscope.lane(key);
    if (step < 0) return select(key, 0, -1, 0);
    const nth = place - lane.starts[step],
      own = lane.steps[step];
    select(key, step, nth < own.path.length ? own.path[nth] : "bonus", place);
  }

  function chipsOf(lane, index, into) {
    const step = lane.steps[index];
    const ids = [...step.path.map((node) => step.ids[node]), step.bonus].slice(0, step.out);
    const capsule = make("span.ds-capsule", { "data-step": index });
    ids.forEach((id, nth) => {
      const kind = !lane.tree ? "plain" : nth < step.path.length ? "acc" : "bonus";
      const origin = kind === "plain" ? "plain decoding" : kind === "acc" ? `accepted at depth ${nth + 1}` : "bonus token";
      // before the first token the line breaks outside the step's frame: else an empty piece of the frame stays behind
      if (/^\s/.test(tokenText(lane, id))) (nth ? capsule : into).append(document.createElement("wbr"));
      capsule.append(
        make(
          `span.ds-chip.${kind}`,
          {
            "data-step": index,
            "data-place": lane.starts[index] + nth,
            title: `${visible(tokenText(lane, id))} · step ${index + 1} · ${origin}`,
          },
          pieces(tokenText(lane, id)),
        ),
      );
    });
    into.append(capsule);
    return capsule;
  }

  function growText(lane, own) {
    const fresh = document.createDocumentFragment();
    if (!own.first && lane.first !== null) {
      own.first = true;
      fresh.append(
        make(
          "span.ds-capsule",
          null,
          make(
            "span.ds-chip.plain",
            { "data-step": -1, "data-place": 0, title: `${visible(tokenText(lane, lane.first))} · from the prefill` },
            pieces(tokenText(lane, lane.first)),
          ),
        ),
      );
    }
    for (; own.drawn < lane.steps.length; own.drawn++) {
      own.capsules.push(chipsOf(lane, own.drawn, fresh));
    }
    if (fresh.childNodes.length) own.text.append(fresh);
  }

  // One bar for each step: x in steps, y in ms. New steps are added to what is there; all lanes share one scale, from zero.
  // The scale of the strips: the longest step, but a rare very long one (the machine was busy) is cut and marked.
  function scale() {
    const ordered = state.lanes.map((lane) => lane.steps.map(total).sort((a, b) => a - b)).filter((times) => times.length);
    const longest = Math.max(1e-9, ...ordered.map((times) => times[times.length - 1]));
    return Math.min(longest, Math.max(0, ...ordered.map((times) => 4 * times[times.length >> 1])) || longest);
  }

  function drawStrip(lane, own, top) {
    if (own.barred === lane.steps.length && own.top === top) return;
    own.top = top;
    for (; own.barred < lane.steps.length; own.barred++) {
      let base = 0;
      lane.steps[own.barred].ms.forEach((value, phase) => {
        if (value > 0.002) own.bars[phase] += `M${own.barred} ${-base.toFixed(3)}v${-value}h.86v${value}z`;
        base += value;
      });
    }
    own.high = lane.steps.flatMap((step, index) => (total(step) > top ? [index] : []));
    own.over.setAttribute("d", own.high.map((index) => `M${index} ${-top}h.86l-.43 ${0.16 * top}z`).join(""));
    own.strip.setAttribute("viewBox", `0 ${-top} ${Math.max(lane.steps.length, 1)} ${top}`);
    own.paths.forEach((path, phase) => path.setAttribute("d", own.bars[phase]));
    own.now.setAttribute("y", -top);
    own.now.setAttribute("height", top);
    own.now.setAttribute("width", lane.steps.length ? Math.max(1, lane.steps.length / 160) : 0);
  }

  function stripWords(lane, own) {
    const above = own.high.length ? ` · ${own.high.length} above the scale` : "";
    return `${lane.steps.length} step${lane.steps.length === 1 ? "" : "s"} of ${ms(lane.figures.decode_ms / lane.steps.length)} ms${ENDED[lane.finish] || ""}${above}`;
  }

  function equality(lane) {
    const seen = lane.equality;
    if (lane.state === "waiting" || lane.state === "loading") return "";
    if (!lane.tree && lane.state === "stopped") return lane.figures.tokens ? "The reference, as far as it came." : "";
    if (!lane.tree) return lane.figures.tokens ? "The reference: what the target writes by itself." : "";
    if (lane.sampled) return "Sampled: the distribution is the target's own; the words may differ from plain decoding.";
    if (!seen) return lane.state === "running" ? "" : "Not compared: plain decoding was not run.";
    if (seen.equal) return `= Equal to plain decoding, ${seen.compared} tokens.`;
    const mine = seen.mine === null ? "the end" : quoted(lane, seen.mine);
    const theirs = seen.plain === null ? "the end" : quoted(lane, seen.plain);
    const where = `Same as plain decoding up to token ${seen.index}, then ${mine} for ${theirs}`;
    if (seen.tie) return `≈ ${where}: a near-tie (plain decoding's two best logits are ${seen.gap} apart) that rounding decided.`;
    return `≠ ${where}${seen.gap === null ? "" : `; the target's two best logits are ${seen.gap} apart`}.`;
  }

  // Who was fastest, by how much, and whether the texts are equal: the first thing to read when a run has ended.
  function summary(unfair) {
    const ended = (how, words) => {
      const names = state.lanes.filter((lane) => lane.state === how).map((lane) => lane.label);
      return names.length ? ` ${words}: ${names.join(", ")}.` : "";
    };
    const broken = ended("stopped", "Stopped") + ended("failed", "Failed"),
      ran = state.lanes.filter((lane) => lane.figures.tps && lane.state !== "failed");
    const open = state.lanes.filter((lane) => ["waiting", "loading", "running"].includes(lane.state));
    if (state.info.running && open.length) {
      // all of them load what is shared, then one after the other warms up and runs
      const busy = open.filter((lane) => lane.state !== "waiting");
      const at = busy.length === 1 ? state.lanes.indexOf(busy[0]) : -1;
      return [at < 0 ? "Getting ready …" : `Lane ${at + 1} of ${state.lanes.length}: ${state.lanes[at].label}. Stop ends it within a step.`];
    }
    const plain = ran.find((lane) => !lane.tree),
      heads = ran.filter((lane) => lane.tree).sort((a, b) => b.figures.tps - a.figures.tps);
    if (!heads.length) return [plain ? `Plain decoding alone: ${number(plain.figures.tps, 1)} tokens/s.` : "", broken.trim()];
    const [best] = heads,
      gain = plain ? best.figures.speedup : null;
    const first =
      gain !== null && unfair
        ? "No fair ratio: the machine was busy with something else while plain decoding ran. Run again for a speed-up."
        : gain === null
        ? `Fastest: ${best.label}, ${number(best.figures.tps, 1)} tokens/s. No speed-up is known: plain decoding was not measured beside it.`
        : gain >= 1
          ? `Fastest: ${best.label}, ${number(gain)}× plain decoding (${number(best.figures.tps, 1)} against ${number(plain.figures.tps, 1)} tokens/s).`
          : `No head pays here: the best one, ${best.label}, runs at ${number(gain)}× of plain decoding.`;
    const slower = heads.filter((lane) => gain >= 1 && !unfair && lane.figures.speedup !== null && lane.figures.speedup < 1);
    const behind = slower.length ? ` Slower than plain decoding: ${slower.map((lane) => lane.label).join(", ")}.` : "";
    return [first, `${texts(heads)}${behind}${broken}`];
  }

  // More rows read the same weights and compute more: where a verification takes clearly less than a plain step, plain
  // decoding was slowed by something else, and a ratio to it flatters every head.
  function disturbed() {
    if (state.info.running) return false;
    const middle = (lane) => lane.steps.map((step) => step.ms[1]).sort((a, b) => a - b)[lane.steps.length >> 1];
    const plain = state.lanes.find((lane) => !lane.tree && lane.steps.length);
    return !!plain && state.lanes.some((lane) => lane.tree && lane.steps.length && middle(lane) < 0.8 * middle(plain));
  }

  function texts(heads) {
    if (heads[0].sampled) return "Sampled: the texts may differ, their distribution is the target's own.";
    const held = heads.filter((lane) => lane.equality),
      equal = held.filter((lane) => lane.equality.equal),
      ties = held.filter((lane) => !lane.equality.equal && lane.equality.tie);
    if (!held.length) return "Texts: not compared, plain decoding was not run.";
    if (equal.length === held.length) return `Texts: ${held.length === 1 ? "equal" : "all equal"} to plain decoding, token for token.`;
    const off = held.length - equal.length - ties.length;
    const parts = [
      [equal.length, "equal to plain decoding"],
      [ties.length, "equal up to a near-tie that rounding decided"],
      [off, "different"],
    ];
    return `Texts: ${parts
      .filter(([count]) => count)
      .map(([count, words]) => `${count} of ${held.length} ${words}`)
      .join(", ")} (see Lossless).`;
  }

  function copyLink() {
    const done = (words) => {
      copy.textContent = words;
      setTimeout(() => (copy.textContent = "Copy link"), 1500);
    };
    // without a secure address there is no clipboard: then the link is shown to be copied by hand
    if (navigator.clipboard) navigator.clipboard.writeText(draftscope.link()).then(() => done("Copied"));
    else window.prompt("A link that opens this view", draftscope.link());
  }

  // What was wrong with the last request is no longer said once the next one is being written.
  for (const [kind, place] of [["input", "#ds-prompt"], ["click", ".ds-examples"]]) {
    document.addEventListener(kind, (event) => {
      if (!event.target.closest(place) || !state.info?.note || state.info.running) return;
      state.info.note = "";
      update();
    });
  }

  // What a person has just caused comes into view: on a phone the lanes stand far below the Run button.
  function show(element, lowest) {
    const { top } = element.getBoundingClientRect();
    if (top < 0 || top > lowest * window.innerHeight) element.scrollIntoView({ block: "start" });
  }

  function update() {
    const info = state.info,
      begun = session !== null && session !== state.session && info.running;
    if (session !== state.session) {
      session = state.session;
      cards.clear();
      grid.replaceChildren();
      grid.dataset.count = state.lanes.length;
      for (const lane of state.lanes) cards.set(lane.key, card(lane));
    }
    put(badge, KIND[info.kind]);
    badge.dataset.kind = info.kind;
    put(title, info.title || visible(info.prompt.replace(/\s+/g, " "), 90).replaceAll("·", " "));
    put(where, [info.where, info.settings].filter(Boolean).join(" · "));
    copy.hidden = !info.link;
    alert.hidden = !info.note;
    put(alert, info.note);
    alert.dataset.failed = info.failed;
    const unfair = disturbed(),
      said = summary(unfair);
    if (verdict.dataset.said !== said.join()) {
      verdict.dataset.said = said.join();
      verdict.replaceChildren(...said.filter(Boolean).map((words, nth) => make(nth ? "p" : "p.ds-first", null, words)));
    }
    const top = scale();
    for (const lane of state.lanes) {
      const own = cards.get(lane.key),
        plain = !lane.tree && lane.method === "autoregressive";
      own.box.dataset.state = lane.state;
      own.box.dataset.method = lane.method;
      own.box.dataset.beat = lane.steps.length % 2;
      put(own.heading, lane.label);
      put(own.about, lane.about);
      put(own.facts, lane.facts);
      put(own.state, STATE[lane.state]);
      put(own.speed, plain && lane.figures.tps ? "1.00×" : lane.figures.speedup === null || unfair ? "–" : `${number(lane.figures.speedup)}×`);
      put(own.rate, number(lane.figures.tps, lane.figures.tps >= 100 ? 0 : 1));
      put(own.tau, number(lane.figures.tau));
      put(own.equal, lane.error || equality(lane));
      own.equal.dataset.kind = lane.error ? "bad" : lane.equality && !lane.equality.equal && !lane.equality.tie ? "off" : "good";
      put(own.empty, lane.steps.length ? "" : EMPTY[lane.state] || "");
      growText(lane, own);
      drawStrip(lane, own, top);
      put(own.stripText, lane.steps.length ? stripWords(lane, own) : "");
    }
    mark();
    if (info.note && info.note !== noted) show(alert, 0.9);
    else if (begun) show(root, 0.4);
    noted = info.note;
  }

  function mark() {
    const moved = [];
    for (const lane of state.lanes) {
      const own = cards.get(lane.key);
      const index = lane.steps.length ? stepOf(lane) : -1;
      const capsule = own.capsules[index] || null;
      own.box.dataset.focus = lane.key === state.focus;
      if (capsule !== own.marked) {
        own.marked?.classList.remove("on");
        capsule?.classList.add("on");
        own.marked = capsule;
        if (capsule) moved.push(own);
      }
      own.picked.forEach((chip) => chip.classList.remove("picked"));
      const chips = lane.key === state.focus && state.node !== null && capsule ? [...capsule.children] : [];
      own.picked = chips.filter((chip) => chip.dataset.place === String(state.place));
      own.picked.forEach((chip) => chip.classList.add("picked"));
      own.now.setAttribute("x", Math.max(0, index));
    }
    requestAnimationFrame(() => reveal(moved)); // when all views are drawn: the layout is made once
  }

  // Scroll inside the lanes only (scrollIntoView would move the page); first measure all, then move all: one layout.
  function reveal(cards_) {
    cards_ = cards_.filter((own) => own.marked);
    const wanted = cards_.map(({ text, marked }) => {
      const up = marked.offsetTop,
        high = marked.offsetHeight,
        top = text.scrollTop,
        room = text.clientHeight;
      return up < top + 4 || up + high > top + room - 4 ? up - room / 2 : null;
    });
    cards_.forEach(({ text }, index) => {
      if (wanted[index] !== null) text.scrollTop = wanted[index];
    });
  }

  return (what) => state.info && (what === "data" ? update() : mark());
};
