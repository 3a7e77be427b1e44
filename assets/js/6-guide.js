// The guided tour: a few stops, each tied to a live part of the page and to the numbers it shows just now.
draftscope.views.guide = (root) => {
  "use strict";
  const { state, make, number, tree, stepOf, visible } = draftscope;
  const open = make("button.ds-button", { type: "button", onclick: () => go(0) }, "Two-minute tour");
  const title = make("h3", { id: "ds-tour-title" }),
    words = make("p"),
    count = make("span.ds-tour-count");
  const back = make("button.ds-button", { type: "button", onclick: () => go(at - 1) }, "Back");
  const next = make("button.ds-button.ds-play", { type: "button", onclick: () => go(at + 1) }, "Next");
  const card = make(
    "div.ds-tour",
    { role: "dialog", "aria-labelledby": "ds-tour-title", hidden: true },
    title,
    words,
    make("div.ds-tour-foot", null, count, make("button.ds-button", { type: "button", onclick: close }, "Skip"), back, next),
  );
  root.append(open);
  root.closest(".gradio-container").append(make("div.ds-root", null, card));
  let at = -1,
    marked = null;

  const focus = () => draftscope.lane(state.focus);
  const withHead = () => (focus() && focus().tree ? focus() : state.lanes.find((lane) => lane.tree && lane.steps.length));
  const chosen = () => {
    const lane = withHead();
    return lane ? { lane, step: lane.steps[stepOf(lane)], index: stepOf(lane) } : null;
  };
  const STOPS = [
    [
      ".ds-lanes",
      "One lane for each method",
      () =>
        "All lanes answer the same prompt with the same target, one after the other. Plain decoding asks the target once for every token; the others let a small head guess first. Every text is the target's own, however well the head guesses; what differs is the time.",
    ],
    [
      ".ds-lane[data-focus=true] .ds-figures",
      "Three numbers",
      () => {
        const lane = withHead();
        return `tau is the tokens that a step gives, speed-up the gain over plain decoding, measured here and now.${lane ? ` ${lane.label}: ${number(lane.figures.tau)} tokens per step, ${lane.figures.speedup === null ? "speed-up not measured" : `${number(lane.figures.speedup)} times the speed`}.` : ""} A step costs more than a plain one, so tau is always above the speed-up.`;
      },
    ],
    [
      ".ds-lane[data-focus=true] .ds-text",
      "Tokens by origin",
      () =>
        "Each run of filled tokens is one step: the n-th was guessed at depth n and accepted. The outlined one at its end is the bonus token, which the target adds itself. Choose any token: everything else follows.",
    ],
    [
      ".ds-step[data-focus=true] .ds-scroll",
      "The draft tree",
      () => {
        const seen = chosen();
        return `From the root, the newest certain token, the head guesses several continuations: the accepted path on top, the others by likelihood.${seen ? ` Here it drafted ${seen.step.ids.length} tokens; the target accepted ${seen.step.path.length} of them and added “${visible(draftscope.tokenText(seen.lane, seen.step.bonus), 20)}”.` : ""} ✓ accepted, × rejected, dashed: never reached. Arrow keys move through the nodes.`;
      },
    ],
    [
      ".ds-step[data-focus=true] aside",
      "Why it was kept or dropped",
      () => {
        const seen = chosen();
        return `The chosen node in words, with the head's probability and the target's. Below it, where this step's time went: drafting in colour, the target's one forward in grey.${seen ? ` ${tree.summary(seen.lane, seen.step, tree.shape(seen.step))}` : ""}`;
      },
    ],
    [
      ".ds-transport",
      "Move through the run",
      () =>
        "Play, or drag, or use the arrow keys. The lanes stay at the same place of the text even where their steps do not line up.",
    ],
    [
      ".ds-verdicts",
      "What HASS and KOALA change",
      () => {
        const seen = state.lanes.filter((lane) => lane.tree && lane.figures.tau);
        return `After depth 1 a head builds on its own guesses. EAGLE's never met those in training, so its errors add up. HASS trains the same layer on its own guesses: it stays good deeper in the tree, at no cost. KOALA uses several layers and an adversary: more room to guess well, each guess dearer, so it has to accept more to pay.${seen.length ? ` Here tau is ${seen.map((lane) => `${number(lane.figures.tau)} for ${lane.label}`).join(", ")}.` : ""}`;
      },
    ],
    [
      "#ds-tabs [role=tablist]",
      "Go on here",
      () =>
        "Charts sum the run up. Race replays all lanes on one clock. Lossless compares the texts. Why shows what HASS and KOALA change. Runs has recorded runs, download and upload.",
    ],
  ];

  function go(index) {
    if (index < 0 || index >= STOPS.length) return close();
    if (at < 0) document.querySelector("#ds-tabs [role=tab]")?.click();
    at = index;
    const [selector, name, text] = STOPS[index];
    marked?.classList.remove("ds-toured");
    marked = document.querySelector(selector) || document.querySelector(".ds-lanes");
    marked.classList.add("ds-toured");
    marked.scrollIntoView({ block: "center" });
    title.textContent = name;
    words.textContent = text();
    count.textContent = `${index + 1} of ${STOPS.length}`;
    back.disabled = index === 0;
    next.textContent = index === STOPS.length - 1 ? "Done" : "Next";
    card.hidden = false;
    place();
    next.focus();
  }

  function place() {
    if (card.hidden || !marked) return;
    const part = marked.getBoundingClientRect(),
      own = card.getBoundingClientRect(),
      wide = document.documentElement.clientWidth,
      high = window.innerHeight;
    const below = part.bottom + 10 + own.height < high,
      above = part.top - 10 - own.height > 0;
    card.style.top = `${below ? part.bottom + 10 : above ? part.top - 10 - own.height : high - own.height - 12}px`;
    card.style.left = `${Math.max(8, Math.min(part.left, wide - own.width - 8))}px`;
  }

  function close() {
    marked?.classList.remove("ds-toured");
    card.hidden = true;
    at = -1;
    open.focus();
  }

  card.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "ArrowRight") go(at + 1);
    if (event.key === "ArrowLeft" && at > 0) go(at - 1);
  });
  window.addEventListener("scroll", place, { passive: true });
  window.addEventListener("resize", place);
  return () => {};
};
