// The bar that moves through the steps of the selected lane; it stays in sight while the page scrolls.
draftscope.views.transport = (root) => {
  "use strict";
  const { state, make, select, emit } = draftscope;
  let timer = null,
    session = null;

  const slider = make("input.ds-slider", {
    type: "range",
    min: 1,
    max: 1,
    value: 1,
    "aria-label": "Step of the selected lane",
    oninput: () => select(state.focus, slider.value - 1),
  });
  const readout = make("output.ds-readout");
  const play = make(
    "button.ds-button.ds-play",
    { type: "button", "aria-label": "Play the steps", onclick: () => run(!timer) },
    "▶",
  );
  const align = make(
    "select.ds-select",
    { "aria-label": "Line up the lanes by", onchange: () => ((state.align = align.value), emit("selection")) },
    make("option", { value: "text" }, "same place in the text"),
    make("option", { value: "number" }, "same step number"),
  );
  const bar = make(
    "div.ds-transport",
    { role: "group", "aria-label": "Move through the steps" },
    make("button.ds-button", { type: "button", "aria-label": "First step", onclick: () => select(state.focus, 0) }, "|◀"),
    make(
      "button.ds-button",
      { type: "button", "aria-label": "Previous step", onclick: () => select(state.focus, state.step - 1) },
      "◀",
    ),
    play,
    make(
      "button.ds-button",
      { type: "button", "aria-label": "Next step", onclick: () => select(state.focus, state.step + 1) },
      "▶|",
    ),
    slider,
    readout,
    make("label.ds-align", null, make("span", null, "Lanes at the"), align),
  );
  bar.addEventListener("keydown", (event) => {
    if (event.key === " " && event.target === slider) (event.preventDefault(), run(!timer));
  });
  root.append(bar);

  function run(on) {
    clearInterval(timer);
    timer = on
      ? setInterval(() => {
          const lane = draftscope.lane(state.focus);
          if (!lane || state.step >= lane.steps.length - 1) run(false);
          else select(state.focus, state.step + 1);
        }, 700)
      : null;
    if (on && draftscope.lane(state.focus) && state.step >= draftscope.lane(state.focus).steps.length - 1) select(state.focus, 0);
    play.textContent = timer ? "❚❚" : "▶";
    play.setAttribute("aria-label", timer ? "Pause" : "Play the steps");
  }

  function mark() {
    const lane = draftscope.lane(state.focus);
    if (!lane) return;
    slider.max = Math.max(1, lane.steps.length);
    slider.value = state.step + 1;
    slider.disabled = lane.steps.length < 2;
    readout.textContent = lane.steps.length ? `step ${state.step + 1} of ${lane.steps.length} · ${lane.label}` : "no step yet";
  }

  return () => {
    if (!state.info) return;
    if (session !== state.session) {
      session = state.session;
      run(false);
    }
    mark();
  };
};
