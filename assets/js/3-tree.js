// The draft tree of one step: shape, words, mask and table. Everything is computed from the step's own record.
draftscope.tree = (() => {
  "use strict";
  const { make, visible, tokenText, quoted, probability, number } = draftscope;
  const STATUS = { a: "accepted", r: "rejected", u: "unreached" };
  const SIGN = { a: "✓", r: "×", u: "" };
  const BOX = 20,
    ROW = 28,
    FONT = 12,
    WIDE = 7.3; // of one letter, in the same unit

  // How high the place of a lane's trees is: rows of a full tree, as far as they fit. It is the same for all steps, so
  // that nothing jumps.
  const room = (nodes) => Math.min(480, Math.max(5, Math.ceil(0.8 * nodes)) * ROW + 10);

  // Levels, children and ranks: a node's children stand in the record's order, which is their rank.
  function shape(step) {
    const children = new Map([[-1, []]]),
      depth = [],
      rank = [],
      sure = [];
    step.ids.forEach((_, node) => {
      const above = step.up[node];
      depth[node] = above < 0 ? 1 : depth[above] + 1;
      sure[node] = (above < 0 ? 1 : sure[above]) * step.q[node];
      if (!children.has(above)) children.set(above, []);
      children.get(above).push(node);
      rank[node] = children.get(above).length;
    });
    return { children, depth, rank, sure, levels: Math.max(0, ...depth) };
  }

  const end = (step) => (step.path.length ? step.path[step.path.length - 1] : -1);

  function ordered(step, form, node) {
    const below = form.children.get(node) || [];
    const taken = below.find((child) => step.mark[child] === "a");
    return taken === undefined ? below : [taken, ...below.filter((child) => child !== taken)];
  }

  // Rows: leaves one below the other, a parent beside its first child. The accepted child comes first, so that the
  // accepted path is a straight line at the top; its siblings follow by rank.
  function rows(step, form, shown) {
    const row = new Map();
    let next = 0;
    (function place(node) {
      const below = ordered(step, form, node).filter(shown);
      const own = next;
      if (node === end(step)) row.set("bonus", own);
      const first = node === end(step) ? 1 : 0; // the bonus token takes the place of a first child
      below.forEach((child, index) => {
        if (index + first) next += 1;
        place(child);
      });
      row.set(node, own);
    })(-1);
    return { row, count: next + 1 };
  }

  // Why the target took or left a node, in words.
  function decision(lane, step, form, node) {
    if (node === -1)
      return "The root: certain before this step begins. It is the bonus token of the step before (of step 1: of the prefill).";
    if (node === "bonus") {
      const after = step.path.length ? `after ${quoted(lane, step.ids[end(step)])}` : "after the root";
      if (!lane.tree) return "Plain decoding: the target's forward gives one token.";
      const tried = (form.children.get(end(step)) || []).length;
      const why = tried ? `none of the ${tried} drafted there was taken` : "the tree has no node there";
      return `The bonus token: what the target itself says ${after} (${why}). It is the next root.`;
    }
    const p = probability(step.p[node]),
      mark = step.mark[node],
      up = step.up[node];
    const choice = choiceAfter(lane, step, up);
    if (mark === "u") {
      if (up === end(step) || step.path.includes(up) || up === -1) return "Not tested: a sibling before it was accepted.";
      return `Unreached: its parent ${quoted(lane, step.ids[up])} was not accepted, so the target's answer here does not count.`;
    }
    if (step.draw && step.draw[node] !== null) {
      const draw = step.draw[node],
        bar = step.bar[node];
      const note = Math.abs(bar - step.p[node]) > 0.0005 ? ` (${p} before its rejected siblings were taken out)` : "";
      return mark === "a"
        ? `Accepted: the draw ${probability(draw)} is at most p = ${probability(bar)}${note}.`
        : `Rejected: the draw ${probability(draw)} is above p = ${probability(bar)}${note}; its share goes to the others.`;
    }
    if (mark === "a") return `Accepted: it is the target's own choice here (p = ${p}).`;
    return `Rejected: the target chose ${choice} here; this one has p = ${p}.`;
  }

  // The token that the target settled on after an accepted node (or the root).
  function choiceAfter(lane, step, up) {
    const place = up === -1 ? 0 : step.path.indexOf(up) + 1;
    const id = place < step.path.length ? step.ids[step.path[place]] : step.bonus;
    return quoted(lane, id);
  }

  function summary(lane, step, form) {
    if (!lane.tree) return `One target forward, one token: ${quoted(lane, step.bonus)}.`;
    const taken = step.path.length,
      stop = end(step);
    const words = taken
      ? `${taken} token${taken === 1 ? "" : "s"} accepted (the tree has ${form.levels} level${form.levels === 1 ? "" : "s"})`
      : "Nothing accepted";
    const below = form.children.get(stop) || [];
    const best = below[0];
    const why =
      best === undefined
        ? `the tree has no guess after ${quoted(lane, stop < 0 ? step.root : step.ids[stop])}`
        : `the head's best guess next was ${quoted(lane, step.ids[best])} (draft ${probability(step.q[best])}), the target ${step.draw ? "drew" : "chose"} ${quoted(lane, step.bonus)}${below.some((node) => step.ids[node] === step.bonus) ? "" : ", which was not among the guesses"}`;
    return `${words}, then the bonus token: ${why}.`;
  }

  function label(lane, step, form, node) {
    const text = visible(tokenText(lane, node === -1 ? step.root : node === "bonus" ? step.bonus : step.ids[node]), 40);
    if (node === -1) return `${text}, root`;
    if (node === "bonus") return `${text}, bonus token`;
    return `${text}, depth ${form.depth[node]}, rank ${form.rank[node]}, draft ${probability(step.q[node])}, target ${probability(step.p[node])}, ${STATUS[step.mark[node]]}`;
  }

  const percent = (value) => (value >= 0.995 ? "100%" : value >= 0.01 ? `${Math.round(100 * value)}%` : "<1%");

  // ---- drawing ----------------------------------------------------------------------------------------------------
  function draw(lane, step, options) {
    const form = shape(step),
      shown = (node) => options.all || step.mark[node] !== "u";
    const { row, count } = rows(step, form, shown);
    const levels = Math.max(form.levels, step.path.length + 1);
    const column = Math.max(88, Math.min(190, (options.width - 8) / (levels + 1))) * options.zoom;
    const zoom = options.zoom,
      wide = column - 14 * zoom,
      high = BOX * zoom,
      line = Math.max(ROW, Math.min(1.3 * ROW, (options.height - 10) / count)) * zoom; // few rows spread out a little
    const width = column * (levels + 1) + 4,
      height = count * line + 6;
    const x = (level) => 3 + level * column,
      y = (node) => 4 + row.get(node) * line;
    const numbered = wide > 100 * zoom; // the probability is also written where there is room for it
    const letters = (kind, lead) => Math.max(3, Math.floor((wide - lead * zoom) / (WIDE * zoom)) - (numbered && kind ? 5 : 1));
    const level = (node) => (node === -1 ? 0 : node === "bonus" ? step.path.length + 1 : form.depth[node]);
    const svg = make("svg.ds-tree", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "tree",
      "aria-label": `Draft tree of ${lane.label}: ${step.ids.length} nodes, ${step.path.length} accepted`,
    });
    const edges = { u: "", r: "", a: "" },
      boxes = [];
    const link = (from, to, kind) => {
      const x0 = x(level(from)) + wide,
        y0 = y(from) + high / 2,
        x1 = x(level(to)),
        y1 = y(to) + high / 2,
        middle = (x0 + x1) / 2;
      edges[kind] += y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}H${middle}V${y1}H${x1}`;
    };
    const box = (node, id, kind) => {
      const left = x(level(node)),
        top = y(node),
        round = kind === "a" || kind === "root" ? high / 2 : kind === "bonus" ? 0 : 2;
      const group = make(`g.ds-node.is-${kind}`, {
        role: "treeitem",
        "aria-level": level(node) + 1,
        "aria-selected": node === options.node,
        "aria-label": label(lane, step, form, node),
        tabindex: node === options.node ? 0 : -1,
        "data-node": node,
      });
      if (kind === "bonus") {
        const cut = 6 * zoom;
        group.append(
          make("polygon.ds-box", {
            points: `${left + cut},${top} ${left + wide - cut},${top} ${left + wide},${top + high / 2} ${left + wide - cut},${top + high} ${left + cut},${top + high} ${left},${top + high / 2}`,
          }),
        );
      } else group.append(make("rect.ds-box", { x: left, y: top, width: wide, height: high, rx: round }));
      const sign = kind === "root" ? "●" : kind === "bonus" ? "+" : SIGN[kind];
      if (sign)
        group.append(
          make("text.ds-sign", { x: left + 9 * zoom, y: top + high * 0.7, "font-size": FONT * zoom, "text-anchor": "middle" }, sign),
        );
      const real = typeof node === "number" && node >= 0,
        lead = sign ? 17 : 8;
      group.append(
        make(
          "text.ds-token",
          { x: left + lead * zoom, y: top + high * 0.7, "font-size": FONT * zoom },
          visible(tokenText(lane, id), letters(real, lead)),
        ),
      );
      if (real) {
        const length = wide - 12 * zoom,
          part = 2.5 * zoom;
        if (numbered)
          group.append(
            make(
              "text.ds-number",
              { x: left + wide - 7 * zoom, y: top + high * 0.7, "font-size": 0.9 * FONT * zoom, "text-anchor": "end" },
              percent(step.q[node]),
            ),
          );
        group.append(
          make("rect.ds-q", { x: left + 6 * zoom, y: top + high + 0.5, width: Math.max(0.5, length * step.q[node]), height: part }),
          make("rect.ds-p", { x: left + 6 * zoom, y: top + high + part + 0.5, width: length * Math.min(1, step.p[node]), height: part }),
        );
      }
      boxes.push(group);
    };
    const walk = (node) => {
      box(node, node === -1 ? step.root : step.ids[node], node === -1 ? "root" : step.mark[node]);
      if (node === end(step)) {
        link(node, "bonus", "a");
        box("bonus", step.bonus, "bonus");
      }
      for (const child of ordered(step, form, node).filter(shown)) {
        link(node, child, step.mark[child]);
        walk(child);
      }
    };
    walk(-1);
    svg.append(
      make("path.ds-edge.is-u", { d: edges.u }),
      make("path.ds-edge.is-r", { d: edges.r }),
      make("path.ds-edge.is-a", { d: edges.a }),
      ...boxes,
    );
    return { svg, form, right: x(level("bonus")) + wide };
  }

  // ---- attention mask: what each row of the target's forward sees -------------------------------------------------
  function mask(lane, step, node, high) {
    const size = step.ids.length + 1,
      cell = Math.max(3, Math.min(18, Math.floor((high - 20) / size))),
      named = cell >= 12, // rows are named where a letter fits
      strip = Math.max(8, 2 * cell),
      left = (named ? 90 : 0) + strip + 2,
      name = (row) => visible(tokenText(lane, row ? step.ids[row - 1] : step.root), 10);
    const paths = { old: "", on: "", own: "", row: "" };
    const square = (column, row) => `M${left + column * cell} ${row * cell}h${cell - 1}v${cell - 1}h${1 - cell}z`;
    for (let row = 0; row < size; row++) {
      paths.old += `M${left - strip - 2} ${row * cell}h${strip - 2}v${cell - 1}h${2 - strip}z`;
      for (let seen = row - 1; seen >= -1; seen = seen < 0 ? -2 : step.up[seen]) paths[seen === row - 1 ? "own" : "on"] += square(seen + 1, row);
    }
    const chosen = typeof node === "number" ? node + 1 : null;
    const side = left + size * cell + 1;
    const names = named
      ? Array.from({ length: size }, (_, row) =>
          make("text.ds-mask-name", { x: 84, y: row * cell + cell * 0.72, "font-size": Math.min(11, cell - 2), "text-anchor": "end" }, name(row)),
        )
      : [];
    const above = [];
    for (let up = chosen === null ? -2 : chosen - 1; up >= 0; up = step.up[up]) above.unshift(quoted(lane, step.ids[up], 12));
    const words =
      chosen === null
        ? ""
        : ` The framed row: ${chosen ? `the root${above.slice(0, -1).map((one) => `, ${one}`).join("")} and ${above[above.length - 1]} itself` : "the root itself"}.`;
    return make(
      "figure.ds-mask",
      null,
      make(
        "svg",
        {
          width: side,
          height: size * cell + 1,
          viewBox: `0 -0.5 ${side} ${size * cell + 1}`,
          role: "img",
          "aria-label": `Attention mask, ${size} rows: each sees the ${step.ctx} committed tokens, its ancestors and itself`,
        },
        make("rect.ds-mask-back", { x: left, y: 0, width: size * cell, height: size * cell }),
        make("path.ds-mask-old", { d: paths.old }),
        make("path.ds-mask-on", { d: paths.on }),
        make("path.ds-mask-own", { d: paths.own }),
        names,
        chosen === null
          ? null
          : make("rect.ds-mask-row", { x: left - strip - 2, y: chosen * cell - 0.5, width: side - left + strip + 1, height: cell }),
      ),
      make(
        "figcaption",
        null,
        `One target forward checks all ${size} rows (root, then ${step.ids.length} nodes). A row sees the ${step.ctx} committed tokens (strip at the left), its own ancestors and itself.${words}`,
      ),
    );
  }

  // ---- the table twin ---------------------------------------------------------------------------------------------
  function table(lane, step, form, chosen, pick) {
    const names = [
      "node",
      "token",
      "parent",
      "depth",
      "rank",
      "draft p",
      "path p",
      "target p",
      ...(step.draw ? ["draw"] : []),
      "status",
    ];
    const cells = (node) => [
      visible(tokenText(lane, step.ids[node]), 24),
      step.up[node] < 0 ? "root" : step.up[node],
      form.depth[node],
      form.rank[node],
      probability(step.q[node]),
      probability(form.sure[node]),
      probability(step.p[node]),
      ...(step.draw ? [probability(step.draw[node])] : []),
    ];
    const line = (node) => {
      const status = `${SIGN[step.mark[node]]} ${STATUS[step.mark[node]]}`.trim();
      const button = make(
        "button",
        {
          type: "button",
          "aria-pressed": String(node === chosen),
          "aria-label": `Node ${node}`,
          tabindex: node === chosen ? 0 : -1,
        },
        String(node),
      );
      return make(
        "tr",
        { "data-node": node, "data-chosen": node === chosen, onclick: () => pick(node) },
        make("th", { scope: "row" }, button),
        cells(node).map((value) => make("td", null, String(value))),
        make(`td.is-${step.mark[node]}`, null, status),
      );
    };
    const ended = `Root ${quoted(lane, step.root)}; accepted ${step.path.length}; bonus token ${quoted(lane, step.bonus)}`;
    const head = names.map((name) => make("th", { scope: "col" }, name));
    const body = step.ids.map((_, node) => line(node));
    const all = [make("caption", null, ended), make("thead", null, make("tr", null, head)), make("tbody", null, body)];
    return make("div.ds-table", null, make("table", null, all));
  }

  return { shape, draw, mask, table, room, decision, summary, label, end, STATUS, number };
})();
