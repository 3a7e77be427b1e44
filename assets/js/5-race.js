// Race: the recorded lanes on one clock, in real or slowed time. A replay of what was measured, and labelled so.
draftscope.views.race = (root) => {
  "use strict";
  const { state, make, pieces, tokenText, number } = draftscope;
  const lanes = new Map();
  let session = null,
    clock = 0,
    before = 0,
    frame = null,
    slow = 1,
    end = 1;

  const go = make("button.ds-button.ds-play", { type: "button", onclick: () => (frame ? pause() : start()) }, "Start");
  const again = make("button.ds-button", { type: "button", onclick: restart }, "Restart");
  const pace = make(
    "select.ds-select",
    { "aria-label": "Pace of the replay", onchange: () => (slow = Number(pace.value)) },
    ["1|real time", "2|2 times slower", "5|5 times slower", "10|10 times slower"].map((entry) =>
      make("option", { value: entry.split("|")[0] }, entry.split("|")[1]),
    ),
  );
  const time = make("output.ds-clock", null, "0.00 s");
  const track = make("div.ds-race");
  root.append(
    make(
      "p.ds-note",
      null,
      make("span.ds-kind", null, "Replay"),
      " The lanes ran one after the other; here they start together on one clock. Times are those that were measured, prefill included.",
    ),
    make("div.ds-transport", { role: "group", "aria-label": "Race" }, go, again, pace, time),
    track,
  );

  // When each token of a lane was there, in ms of its own clock.
  function arrivals(lane) {
    const out = [];
    if (lane.first !== null && lane.prefill !== null) out.push({ at: lane.prefill, id: lane.first, kind: "plain" });
    for (const step of lane.steps) {
      const at = step.t + draftscope.total(step);
      [...step.path.map((node) => step.ids[node]), step.bonus]
        .slice(0, step.out)
        .forEach((id, nth) => out.push({ at, id, kind: !lane.tree ? "plain" : nth < step.path.length ? "acc" : "bonus" }));
    }
    return out;
  }

  function build() {
    pause();
    lanes.clear();
    track.replaceChildren();
    for (const lane of state.lanes.filter((one) => one.steps.length)) {
      const bar = make("div.ds-race-fill"),
        words = make("span.ds-race-count"),
        text = make("div.ds-text.ds-race-text", { tabindex: 0, role: "group", "aria-label": `${lane.label}: replayed text` });
      track.append(
        make(
          "section.ds-race-lane",
          { "data-method": lane.method },
          make("header", null, make("span.ds-swatch", { "aria-hidden": "true" }), make("h3", null, lane.label), words),
          make("div.ds-race-bar", null, bar),
          text,
        ),
      );
      lanes.set(lane.key, { lane, arrivals: arrivals(lane), shown: 0, bar, words, text });
    }
    end = Math.max(1, ...[...lanes.values()].map((own) => (own.arrivals.length ? own.arrivals[own.arrivals.length - 1].at : 0)));
    clock = end; // the finished race, until someone starts it
    paint();
    pause();
  }

  function paint() {
    for (const own of lanes.values()) {
      const { lane } = own,
        fresh = document.createDocumentFragment();
      if (own.shown && own.arrivals[own.shown - 1].at > clock) {
        own.shown = 0;
        own.text.replaceChildren();
      }
      for (; own.shown < own.arrivals.length && own.arrivals[own.shown].at <= clock; own.shown++) {
        const { id, kind } = own.arrivals[own.shown],
          text = tokenText(lane, id);
        if (/^\s/.test(text)) fresh.append(document.createElement("wbr"));
        fresh.append(make(`span.ds-chip.${kind}`, null, pieces(text)));
      }
      if (fresh.childNodes.length) {
        own.text.append(fresh);
        own.text.scrollTop = own.text.scrollHeight;
      }
      const done = own.shown === own.arrivals.length;
      own.bar.style.width = `${(100 * own.shown) / own.arrivals.length}%`;
      own.words.textContent = done
        ? `${own.shown} tokens in ${number(own.arrivals[own.shown - 1].at / 1000)} s`
        : `${own.shown} of ${own.arrivals.length} tokens`;
    }
    time.textContent = `${number(Math.min(clock, end) / 1000)} s`;
  }

  function tick(now) {
    clock += (now - before) / slow;
    before = now;
    paint();
    if (clock >= end) pause();
    else frame = requestAnimationFrame(tick);
  }

  function start() {
    if (clock >= end) clock = 0;
    before = performance.now();
    frame = requestAnimationFrame(tick);
    go.textContent = "Pause";
  }

  function pause() {
    cancelAnimationFrame(frame);
    frame = null;
    go.textContent = clock > 0 && clock < end ? "Go on" : "Start";
  }

  function restart() {
    clock = 0;
    paint();
    if (!frame) start();
  }

  return (what) => {
    if (what !== "data" || !state.info || state.info.running) return;
    if (session !== state.session + state.lanes.map((lane) => lane.steps.length)) {
      session = state.session + state.lanes.map((lane) => lane.steps.length);
      build();
    }
  };
};
