// What every part of the page shares: the lanes as received, the selection, and safe ways to make elements.
// Token text reaches the document through text nodes only.
window.draftscope = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const listeners = new Set();
  const state = {
    session: null,
    info: null,
    lanes: [],
    focus: null,
    step: 0,
    place: 0,
    node: null,
    align: "text",
    follow: true,
    look: "tree",
    zoom: 1,
    beside: false,
    mask: false,
  };

  function make(name, attributes, ...children) {
    const [tag, ...classes] = name.split(".");
    const drawn = ["svg", "g", "path", "rect", "line", "text", "title", "polygon", "circle"].includes(tag);
    const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
    if (classes.length) element.setAttribute("class", classes.join(" "));
    for (const [key, value] of Object.entries(attributes || {})) {
      const told = key.startsWith("aria-") && typeof value === "boolean"; // these want the words true and false
      if (value === null || value === undefined || (value === false && !told)) continue;
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value === true && !told ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  // ---- token text -------------------------------------------------------------------------------------------------
  const GLYPH = /(<0x[0-9A-F]{2}>)|([ \n\t\r\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff])/g;
  const KNOWN = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };

  function glyph(found) {
    if (found.length > 1) return found.slice(3, 5);
    const code = found.codePointAt(0);
    return (
      KNOWN[found] || (code < 32 ? String.fromCharCode(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`)
    );
  }

  function clip(text, limit) {
    const points = text.length > limit ? [...text.slice(0, 2 * limit)] : null;
    return points && points.length > limit ? `${points.slice(0, limit - 1).join("")}…` : text;
  }

  // One line of text with whitespace and bytes as glyphs: for labels, titles and drawings.
  const visible = (text, limit = 60) => (text === "" ? "∅" : clip(text.replace(GLYPH, glyph), limit));

  // The same as nodes, glyphs marked as such; a newline also breaks the line.
  function pieces(text, limit = 400) {
    if (text === "") return [make("span.ds-ws", null, "∅")];
    const cut = clip(text, limit),
      out = [];
    let last = 0;
    for (const match of cut.matchAll(GLYPH)) {
      if (match.index > last) out.push(cut.slice(last, match.index));
      out.push(make(match[1] ? "span.ds-byte" : "span.ds-ws", null, glyph(match[0])));
      if (match[0] === "\n") out.push("\n");
      last = match.index + match[0].length;
    }
    if (last < cut.length) out.push(cut.slice(last));
    return out;
  }

  const tokenText = (lane, id) => (id in lane.texts ? lane.texts[id] : `<${id}>`);
  const quoted = (lane, id, limit = 24) => `“${visible(tokenText(lane, id), limit)}”`;

  // ---- figures ----------------------------------------------------------------------------------------------------
  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const ms = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  const probability = (value) =>
    value === null || value === undefined
      ? "–"
      : value >= 0.9995
        ? "1.00"
        : value >= 0.001
          ? value.toFixed(value < 0.01 ? 4 : 3)
          : value === 0
            ? "0"
            : value.toExponential(0);
  const total = (step) => step.ms.reduce((sum, value) => sum + value, 0);

  // Writes only what is new: most of a streamed update says what the page shows already.
  function put(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  // ---- words that explain themselves on hover and focus -----------------------------------------------------------
  const TERMS = {
    tau: "Mean acceptance length: tokens per step, bonus token included. 1.00 is plain decoding. The last step counts with all that it accepted, even where the text ends within it.",
    "speed-up": "Tokens per second over those of measured plain decoding: same prompt, same process, same settings.",
    "tokens/s": "Tokens of the steps over the time of the steps; the prefill and the first token stand apart.",
    "bonus token": "The token that the target itself adds at the end of a step. It is the root of the next step.",
    accepted: "The target would have written the same token here, so it is kept.",
    rejected: "Its parent was accepted, but the target wants another token here.",
    unreached: "Its parent was not accepted, so it was never a candidate. Its check was part of the same forward.",
    "draft p": "Probability that the head gave this token, given its parent.",
    "target p": "Probability that the target gives this token here, after temperature and filters.",
    "path p": "Product of the draft probabilities from the root: the score by which the tree was grown.",
    rank: "Place among the guesses for the same parent, likeliest first.",
    depth: "Tokens ahead of the root. Depth n can only be accepted when depth n-1 was.",
    draw: "The random number that decided: accepted where it is at most p.",
    "logit gap": "Best minus second-best logit of the target. Near zero, rounding can swap the two.",
    "runner-up": "The target's second choice here.",
  };
  let terms = 0;

  function term(name, words) {
    if (!TERMS[name]) return make("span", null, words || name);
    const id = `ds-term-${++terms}`;
    return make(
      "span.ds-term",
      { tabindex: 0, "aria-describedby": id },
      words || name,
      make("span.ds-tip", { role: "tooltip", id }, TERMS[name]),
    );
  }

  // A tip near the right edge moves left until it fits.
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const tip = event.target.closest?.(".ds-term")?.querySelector(".ds-tip");
      if (!tip) return;
      tip.style.translate = "0";
      const over = tip.getBoundingClientRect().right + 8 - document.documentElement.clientWidth;
      tip.style.translate = `${-Math.max(0, over)}px`;
    });
  }

  // What was shown before a run that made nothing: it comes back, so that the page is never empty.
  let earlier = null;
  function comeBack() {
    if (!earlier) return false;
    const { look, zoom, beside, mask, align } = state;
    Object.assign(state, earlier, { look, zoom, beside, mask, align });
    earlier = null;
    return true;
  }

  // ---- what arrives -----------------------------------------------------------------------------------------------
  // The opening view is in the page from the start: where the address names another one, it is not flashed before that.
  let opening = ["run", "lane", "step"].some((name) => new URLSearchParams(location.search).has(name)) ? "" : null;
  function receive(text) {
    if (!text) return;
    if (opening === "") {
      opening = text;
      setTimeout(() => state.info || take(text), 5000); // nothing else came
      return;
    }
    if (opening && JSON.parse(text).kind === "keep") take(opening); // a refusal stands below what is shown
    opening = null;
    take(text);
  }
  function take(text) {
    const message = JSON.parse(text);
    const before = state.info;
    if (message.kind === "keep" && before) {
      // refused, or stopped before it began: the lanes stay, or come back
      if (message.ended) comeBack();
      state.info = { ...state.info, running: before.running && !message.ended, note: message.note, failed: message.failed };
      announce(before, state.info, false);
      return emit("data");
    }
    const fresh = message.session !== state.session;
    if (fresh) {
      if (before && state.lanes.some((lane) => lane.steps.length)) earlier = { ...state };
      state.session = message.session;
      state.lanes = message.lanes.map((lane) => ({ key: lane.key, steps: [], starts: [], texts: {} }));
      state.follow = true;
      state.node = null;
    }
    for (const [index, part] of message.lanes.entries()) {
      const lane = state.lanes[index];
      const { steps, texts, at, ...rest } = part;
      Object.assign(lane, rest);
      Object.assign(lane.texts, texts);
      if (at <= lane.steps.length) lane.steps.splice(at, steps.length, ...steps);
      for (let i = at <= lane.starts.length ? at : lane.starts.length; i < lane.steps.length; i++) {
        lane.starts[i] = i ? lane.starts[i - 1] + lane.steps[i - 1].out : 1; // place in the output of the step's first token
      }
    }
    state.info = message;
    if (!message.running && message.kind === "live" && !state.lanes.some((lane) => lane.steps.length) && comeBack()) {
      state.info = { ...state.info, note: message.note, failed: message.failed };
      announce(before, state.info, false);
      return emit("data");
    }
    if (fresh || !lane_(state.focus)) choose();
    else if (state.follow && message.running) {
      const running = state.lanes.find((lane) => lane.state === "running" && lane.steps.length);
      if (running) point(running, running.steps.length - 1, null);
    } else if (before && before.running && !message.running && state.follow) choose();
    if (message.select) {
      const asked =
        state.lanes.find(
          (lane) => lane.steps.length && (lane.key.endsWith(`:${message.select.lane}`) || lane.method === message.select.lane),
        ) || lane_(state.focus);
      if (asked) point(asked, Math.min(Math.max(message.select.step, 1), asked.steps.length) - 1, null);
      state.follow = false;
    }
    announce(before, message, fresh);
    emit("data");
    if (!fresh || before) address();
  }

  // The address follows the view, so that it can be passed on; recorded runs keep lane and step in it.
  let due = null;
  function address() {
    clearTimeout(due);
    due = setTimeout(() => state.info && state.info.link && history.replaceState(null, "", link()), 250);
  }

  function link() {
    const asked = new URLSearchParams(state.info.link),
      theme = new URLSearchParams(location.search).get("__theme");
    if (state.info.kind === "recorded") {
      asked.set("lane", state.focus.split(":").slice(1).join(":"));
      asked.set("step", state.step + 1);
    }
    if (theme) asked.set("__theme", theme);
    return `${location.origin}${location.pathname}?${asked}`;
  }

  const lane_ = (key) => state.lanes.find((lane) => lane.key === key);

  // A selection always exists: the head's lane with the longest accepted paths, at its first long one.
  function choose() {
    const ready = state.lanes.filter((lane) => lane.steps.length);
    const lane =
      ready.filter((l) => l.tree).sort((a, b) => (b.figures.tau || 0) - (a.figures.tau || 0))[0] || ready[0] || state.lanes[0];
    if (!lane) return;
    const early = lane.steps.slice(0, 16).map((step) => step.path.length);
    point(lane, Math.max(0, early.indexOf(Math.max(0, ...early))), null);
  }

  function point(lane, step, node, place) {
    Object.assign(state, { focus: lane.key, step, node, place: place === undefined ? lane.starts[step] || 1 : place });
  }

  function select(key, step, node = null, place) {
    const lane = lane_(key);
    if (!lane || !lane.steps.length) return;
    point(lane, Math.min(Math.max(step, 0), lane.steps.length - 1), node, place);
    state.follow = false;
    emit("selection");
    address();
  }

  // The step that another lane shows beside the selected one: where it emitted the same place of the text, or by number.
  function stepOf(lane) {
    if (lane.key === state.focus) return Math.min(state.step, lane.steps.length - 1);
    if (state.align === "number") return Math.min(state.step, lane.steps.length - 1);
    let low = 0,
      high = lane.steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (lane.starts[middle] <= state.place) low = middle;
      else high = middle - 1;
    }
    return lane.steps.length ? low : -1;
  }

  function announce(before, message, fresh) {
    const node = document.getElementById("ds-status");
    if (!node) return;
    let said = null;
    if (message.note && message.note !== (before && before.note)) said = message.note;
    else if (fresh && message.running) said = "Run started.";
    else if (before && before.running && !message.running)
      said = `Run ended: ${state.lanes.map((l) => `${l.label}: ${l.state}, ${l.figures.tokens + (l.figures.steps ? 1 : 0)} tokens`).join("; ")}.`;
    if (said) node.textContent = said;
  }

  function emit(what) {
    for (const listener of listeners) listener(what);
  }

  // Draw `view` inside a gr.HTML component; only the component that is given `watch` receives data.
  function mount(element, view, props, watch) {
    const root = element.querySelector(".ds-root") || element;
    const draw = draftscope.views[view](root);
    listeners.add((what) => root.isConnected && draw(what));
    if (watch) {
      watch("value", () => receive(props.value));
      receive(props.value);
    } else draw("data");
  }

  // Gradio's upload button says nothing of a file that is too large to be sent
  document.addEventListener("change", ({ target }) => {
    const most = window.gradio_config?.max_file_size;
    const large = most && target.type === "file" && [...target.files].find((file) => file.size > most);
    if (!large) return;
    const megabytes = (bytes) => `${+(bytes / 2 ** 20).toFixed(2)} MB`;
    const note = `${large.name} has ${megabytes(large.size)}: this server takes files of ${megabytes(most)} at most`;
    receive(JSON.stringify({ kind: "keep", note, failed: true }));
  }, true);

  return {
    views: {},
    state,
    make,
    term,
    visible,
    pieces,
    tokenText,
    quoted,
    number,
    ms,
    probability,
    total,
    put,
    select,
    stepOf,
    link,
    lane: lane_,
    emit,
    mount,
    receive,
  };
})();
