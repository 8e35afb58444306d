// The Lab's plots, drawn from data (see lab_pictures.py): lines as SVG, bars as HTML. Series differ by colour, dash and
// marker, so that none is told by colour alone. Text only ever becomes text nodes.
(() => {
  const sd = window.specdemo;
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 290;
  const LONGEST = 2; // times the highest point: how far the axis follows whiskers
  const CROWD = 40; // points of a series; more get small markers
  const ASIDE = 7; // px between series that share their places
  const ROOM = { top: 14, right: 18, bottom: 48, left: 58 }; // px around the field
  const COLOURS = 6;
  const DASHES = ["", "7 4", "2 3", "10 3 2 3", "5 2", "1 4"];
  const MARKERS = [
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0Z",
    "M-4,-4H4V4H-4Z",
    "M0,-5.5L5.2,4H-5.2Z",
    "M0,-6L5,0L0,6L-5,0Z",
    "M-5,-1.5H-1.5V-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5Z",
    "M0,5.5L-5.2,-4H5.2Z",
  ];
  const fixed = (digits) => (value) => value.toFixed(digits);
  const percent = (digits) => (value) => `${(100 * value).toFixed(digits)}%`;
  const raised = (power) => [...String(power)].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("");
  const FORMATS = {
    "": String,
    number: (value) => String(+value.toPrecision(3)),
    whole: (value) => Math.round(value).toLocaleString("en"),
    one: fixed(1),
    two: fixed(2),
    three: fixed(3),
    ms: (value) => value.toFixed(value < 1 ? 3 : value < 100 ? 2 : 0),
    times: (value) => `${value.toFixed(2)}×`,
    times3: (value) => `${value.toFixed(3)}×`,
    percent: percent(0),
    percent1: percent(1),
    p: (value) => (value === 0 ? "0" : value < 0.001 ? `10${raised(Math.round(Math.log10(value)))}` : String(+value.toPrecision(2))),
    yes: (value) => (value ? "✓ yes" : "✗ no"),
  };

  /** A value in words; [mean, low, high] with its interval, and a dash for what there is not. */
  sd.format = (value, format) => {
    if (value === null || value === undefined) return "–";
    if (!Array.isArray(value)) return FORMATS[format](value);
    const [mean, low, high] = value.map((part) => (part === null ? null : FORMATS[format](part)));
    return low === null ? mean : `${mean} (${low} to ${high})`;
  };
  const between = (low, high, format) => (low === null || low === undefined ? "" : `, ${sd.format(low, format)} to ${sd.format(high, format)}`);

  const draw = (parent, tag, attributes, className) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (className) node.setAttribute("class", className);
    parent.append(node);
    return node;
  };
  const write = (parent, text, x, y, anchor, className = "") => {
    draw(parent, "text", { x, y, "text-anchor": anchor }, className).textContent = text;
  };

  /** Round numbers from `low` to `high`, about five of them. */
  const ticks = (low, high) => {
    const rough = (high - low) / 5 || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
  };

  /** From numbers to pixels. A logarithmic axis takes what lies below its end for its end. */
  const scale = (axis, values, start, end) => {
    const seen = values.filter((value) => value !== null && value !== undefined);
    const named = axis.ticks?.length;
    let low = named ? -0.3 : axis.from ?? Math.min(...seen);
    let high = named ? named - 0.7 : axis.to ?? Math.max(...seen) * (axis.from === 0 ? 1.06 : 1);
    if (!(high > low)) high = low + 1;
    const place = axis.log ? (value) => Math.log10(Math.max(value, axis.from)) : (value) => value;
    [low, high] = [place(low), place(high)];
    const to = (value) => start + ((place(value) - low) / (high - low)) * (end - start);
    const marks = named ? axis.ticks.map((_, at) => at) : axis.log ? ticks(low, high).map((power) => 10 ** power) : ticks(low, high);
    return { to, marks, text: (value) => (named ? axis.ticks[value] : sd.format(value, axis.format)) };
  };

  // A seventh series has the colour of the first, but neither its marker nor its dashes.
  const shape = (place) => (place + Math.floor(place / COLOURS)) % COLOURS;

  const marker = (parent, place, x, y, size = 1) =>
    draw(parent, "path", { d: MARKERS[shape(place)], transform: `translate(${x},${y}) scale(${size})` }, "sd-marker");

  const drawLines = (spec, root) => {
    const width = Math.max(root.clientWidth, 260);
    const points = spec.series.flatMap((series) => series.points);
    const x = scale(spec.x, points.map(([at]) => at), ROOM.left, width - ROOM.right);
    const heights = [...points.map(([, value]) => value), ...spec.rules.map((rule) => rule.y)];
    const reach = Math.min(LONGEST * Math.max(...heights), Math.max(...points.map(([, value, , high]) => high ?? value)));
    const y = scale(spec.y, [...heights, reach], HEIGHT - ROOM.bottom, ROOM.top);
    const svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ width, height: HEIGHT, role: "img" })) svg.setAttribute(name, value);
    svg.setAttribute("aria-label", spoken(spec, x));
    for (const at of y.marks) {
      draw(svg, "line", { x1: ROOM.left, x2: width - ROOM.right, y1: y.to(at), y2: y.to(at) }, "sd-grid");
      write(svg, y.text(at), ROOM.left - 8, y.to(at) + 4, "end");
    }
    const every = Math.ceil(x.marks.length / (width / 60));
    x.marks.forEach((at, place) => place % every || write(svg, x.text(at), x.to(at), HEIGHT - ROOM.bottom + 20, "middle"));
    write(svg, spec.x.label, (ROOM.left + width - ROOM.right) / 2, HEIGHT - 8, "middle", "sd-axis");
    for (const rule of spec.rules) {
      draw(svg, "line", { x1: ROOM.left, x2: width - ROOM.right, y1: y.to(rule.y), y2: y.to(rule.y) }, "sd-rule");
    }
    const apart = Math.min(ASIDE, (0.7 * (x.to(1) - x.to(0))) / spec.series.length);
    spec.series.forEach((series, place) => {
      const aside = spec.x.ticks ? (place - (spec.series.length - 1) / 2) * apart : 0; // or whiskers would hide each other
      const group = draw(svg, "g", { transform: `translate(${aside},0)` }, `sd-series sd-s${place % COLOURS}`);
      const path = series.points.map(([at, value], step) => `${step ? "L" : "M"}${x.to(at)},${y.to(value)}`).join("");
      draw(group, "path", { d: path, "stroke-dasharray": DASHES[shape(place)] }, "sd-line");
      for (const [at, value, low, high] of series.points) {
        if (high !== null && high !== undefined) {
          const [centre, bottom, top] = [x.to(at), y.to(low ?? value), Math.max(y.to(high), ROOM.top)];
          const cap = top > ROOM.top ? `M${centre - 4},${top}h8` : ""; // one that goes on beyond the field has none
          draw(group, "path", { d: `${cap}M${centre},${top}V${bottom}M${centre - 4},${bottom}h8` }, "sd-whisker");
        }
        const dot = marker(group, place, x.to(at), y.to(value), series.points.length > CROWD ? 0.55 : 1);
        const words = `${sd.format(value, spec.y.format)}${between(low ?? (high && value), high, spec.y.format)}`;
        dot.sdWhy = [series.name, `${spec.x.label} ${x.text(at)}: ${words}`];
        if (series.points.length === 1) write(group, sd.format(value, spec.y.format), x.to(at) + 9, y.to(value) - 7, "start", "sd-point");
      }
    });
    return svg;
  };

  const spoken = (spec, x) => {
    const told = spec.series.map(({ name, points }) => {
      const shown = points.length > 24 ? [points[0], points.at(-1)] : points; // the table has them all
      return `${name}: ${shown.map(([at, value]) => `${x.text(at)}: ${sd.format(value, spec.y.format)}`).join(", ")}`;
    });
    return `${spec.title}. ${spec.x.label}: ${spec.y.label}. ${told.join(". ")}`;
  };

  const legend = (spec) => {
    const list = sd.make("ul", "sd-plot-key");
    const add = (name, paint) => {
      const item = sd.make("li");
      const swatch = document.createElementNS(SVG, "svg");
      for (const [key, value] of Object.entries({ width: 34, height: 14, "aria-hidden": true })) swatch.setAttribute(key, value);
      paint(swatch);
      item.append(swatch, name);
      list.append(item);
    };
    spec.series.forEach(({ name, points }, place) =>
      add(name, (swatch) => {
        const group = draw(swatch, "g", {}, `sd-series sd-s${place % COLOURS}`);
        if (points.length > 1) draw(group, "path", { d: "M0,7H34", "stroke-dasharray": DASHES[shape(place)] }, "sd-line");
        marker(group, place, 17, 7);
      }),
    );
    for (const { name } of spec.rules) add(name, (swatch) => draw(swatch, "path", { d: "M0,7H34" }, "sd-rule"));
    return list;
  };

  /** Rows of name, bar and value on one scale from 0. Where rows have a `start`, the bars are changes, and the scale
   *  begins where it must; what has no start is then a mark. */
  const drawBars = (spec) => {
    const values = spec.rows.flatMap(({ value, high, start, mark }) => [value, high, start, mark]).filter((x) => x !== undefined && x !== null);
    const changes = spec.rows.some((row) => row.start !== undefined);
    const [least, most] = changes ? [Math.min(...values), Math.max(...values)] : [0, Math.max(...values) || 1];
    const margin = changes ? 0.06 * (most - least || 1) : 0;
    const at = (value) => `${(100 * (value - least + margin)) / (most - least + 2 * margin)}%`;
    const long = (from, to) => `${(100 * (to - from)) / (most - least + 2 * margin)}%`;
    const list = sd.make("ul", "sd-bars");
    for (const row of spec.rows) {
      const { name, value, low, high, start, words } = row;
      const mark = row.mark ?? (changes && start === undefined ? value : undefined);
      const track = sd.make("div", "sd-bar-track");
      const piece = (className, style) => {
        const node = sd.make("i", className);
        Object.assign(node.style, style);
        track.append(node);
      };
      const kind = start === undefined ? "" : value < start ? " sd-less" : " sd-more";
      const [left, right] = [start ?? 0, value].sort((one, other) => one - other);
      if (!changes || kind) piece(`sd-bar${kind}`, { left: at(left), width: long(left, right) });
      if (high !== undefined && high !== null) piece("sd-reach", { left: at(low ?? value), width: long(low ?? value, high) });
      if (mark !== undefined) piece("sd-mark", { left: at(mark) });
      const shown = kind ? `${value < start ? "−" : "+"}${sd.format(right - left, spec.format)}` : sd.format(value, spec.format);
      const item = sd.make("li");
      item.append(sd.make("span", "sd-bar-name", name), track, sd.make("b", "", shown));
      const told = [words, row.mark === undefined ? "" : `${spec.mark}: ${sd.format(mark, spec.format)}`].filter(Boolean).join(". ");
      item.sdWhy = [name, `${sd.format(value, spec.format)}${between(low ?? (high ? value : null), high, spec.format)}. ${told}`];
      item.tabIndex = 0;
      list.append(item);
    }
    return list;
  };

  const barKey = ({ mark, whisker, rows }) => {
    const key = sd.make("ul", "sd-plot-key");
    const reaches = rows.some(({ high }) => high !== undefined && high !== null);
    for (const [className, words] of [["sd-reach", reaches && whisker], ["sd-mark", mark]]) {
      if (!words) continue;
      const item = sd.make("li", "", words);
      const swatch = sd.make("span", "sd-key-track");
      swatch.append(sd.make("i", className));
      item.prepend(swatch);
      key.append(item);
    }
    return key;
  };

  /** A figure of a plot. Lines are drawn when it has a width, and again when that changes. */
  sd.plot = (spec) => {
    const figure = sd.make("figure", `sd-plot sd-card${spec.wide ? " sd-wide" : ""}`);
    const caption = sd.make("figcaption");
    caption.append(sd.make("b", "", spec.title), sd.make("span", "", spec.words));
    figure.append(caption);
    if (spec.kind === "bars") {
      figure.append(drawBars(spec), barKey(spec));
      return figure;
    }
    const field = sd.make("div", "sd-field");
    figure.append(sd.make("p", "sd-axis", spec.y.label), field, legend(spec));
    let width = 0;
    new ResizeObserver(() => {
      if (field.clientWidth === width || !field.clientWidth) return;
      width = field.clientWidth;
      field.replaceChildren(drawLines(spec, field));
    }).observe(field);
    return figure;
  };
})();
