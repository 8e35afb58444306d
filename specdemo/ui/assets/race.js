// The arena: takes the messages of a run (see lanes.py) and draws them. Text only ever becomes text nodes.
(() => {
  const sd = window.specdemo;
  // A browser on the same processor takes from the engine what it draws: text as it comes, figures more seldom.
  const FIGURES_MS = 500;
  const CHARTS_MS = 2000;
  const NARROW = 900; // px; there the arena lies below the form, see race.css
  const LANES = {
    plain: ["Target alone", "The target writes one token in every pass."],
    speculative: ["With a drafter", "The drafter guesses a few tokens, the target checks them all in one pass and keeps the good ones."],
  };
  const MAX_K = 16;
  const MAX_STRIP = 4096; // px; a longer text shares them
  const GUESSES = ["Guesses in each round", "Along the text: as high as the drafter guessed ahead, and filled as far as its guesses passed."];
  const ENDINGS = { eos: "finished", stop: "stop string", length: "limit" };

  sd.UNREACHABLE = "The server cannot be reached. Try again."; // Gradio answers undefined then
  sd.KINDS = [
    ["a", "accepted", "The drafter guessed it and it passed the target's test."],
    ["r", "resampled", "A guess failed, so the target drew this token in its place."],
    ["b", "bonus", "Every guess of the round passed, so the target's next token came for free."],
    ["t", "target", "The target wrote it by itself: no guess was involved."],
    ["x", "rejected", "The drafter guessed it, but it failed the test and was thrown away."],
    ["u", "untested", "It came after the guess that failed, or after the end, so it was thrown away untested."],
  ];

  const skeleton = document.createElement("template");
  skeleton.innerHTML = sd.html;
  /** A fresh copy of a template of page.html. */
  sd.clone = (id) => skeleton.content.getElementById(id).content.cloneNode(true);
  sd.make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  /** Text that is there already is left alone: a change is laid out, and read out where that is on. */
  sd.put = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  sd.number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  sd.percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)}%`);

  sd.LOST_MS = 10_000;

  /** The messages of a run come as server-sent events, see stream.py. What a lost connection misses, the browser asks
   *  for by itself; `lost` is called when it gives up, or when there is no connection for too long. */
  sd.listen = (run, take, lost) => {
    const root = new URL(window.gradio_config.root || "/", window.location.href).pathname.replace(/\/$/, "");
    const source = new EventSource(`${root}/races/${run}`);
    let waiting = null;
    source.onmessage = (event) => take(JSON.parse(event.data));
    source.onopen = () => {
      clearTimeout(waiting);
      waiting = null;
    };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) return lost();
      waiting ??= setTimeout(() => {
        if (source.readyState === EventSource.CLOSED) return; // by the page, which wants no more of it
        source.close();
        lost();
      }, sd.LOST_MS);
    };
    return source;
  };
  sd.save = (text, name, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  /** How many times as fast the speculative lane is by the figures so far, see stats.speed_up. */
  const speedUp = (plain, speculative) => {
    const drafted = speculative.draft_efficiency !== null;
    if (!drafted || Math.min(plain.tokens, speculative.tokens) < 2) return null;
    const longest = Math.max(plain.tokens, speculative.tokens);
    const secondsFor = ({ tokens, seconds, prompt_seconds: once }) => {
      if (tokens === longest) return seconds;
      return tokens > 1 ? once + ((longest - 1) * (seconds - once)) / (tokens - 1) : 0;
    };
    const [alone, drafting] = [plain, speculative].map(secondsFor);
    return alone && drafting ? alone / drafting : null;
  };

  /** One lane: its pane and the head above it. Rows wait in `rows` until the next frame. */
  class Lane {
    constructor(name) {
      this.node = sd.clone("sd-lane").firstElementChild;
      this.node.dataset.lane = name;
      const find = (selector) => this.node.querySelector(selector);
      this.pane = find(".sd-pane");
      this.text = find(".sd-text");
      this.parts = { title: find("h2"), state: find(".sd-state"), rate: find(".sd-rate b"), bar: find(".sd-track i") };
      this.parts.tokens = find(".sd-tokens");
      this.parts.clock = find(".sd-clock");
      this.guesses = find(".sd-guesses canvas");
      this.guesses.tabIndex = 0;
      this.guesses.sdWhy = GUESSES;
      this.title(LANES[name][0]);
      this.text.dataset.empty = LANES[name][1];
      this.pane.addEventListener("scroll", () => (this.stuck = this.atBottom()), { passive: true });
      this.clear();
    }

    title(text) {
      this.parts.title.textContent = text;
      this.pane.setAttribute("aria-label", `Text of the lane: ${text}`);
    }

    clear(max) {
      this.max = max;
      this.rows = [];
      this.figures = null;
      this.stuck = true;
      this.counts = { a: 0, r: 0, b: 0, t: 0, x: 0, u: 0 };
      this.text.replaceChildren();
      this.clearGuesses();
      this.parts.state.textContent = "";
      this.parts.rate.textContent = "–";
      this.parts.tokens.textContent = max ? `0 of ${max} tokens` : "–";
      this.parts.clock.textContent = max ? "0.00 s" : "–";
      this.parts.bar.style.transform = "scaleX(0)";
    }

    atBottom() {
      return this.pane.scrollHeight - this.pane.scrollTop - this.pane.clientHeight < 24;
    }

    take(news) {
      this.rows.push(...news.rounds);
      this.figures = news.figures;
    }

    draw() {
      if (!this.rows.length) return;
      const fragment = document.createDocumentFragment();
      for (const row of this.rows) {
        fragment.append(this.round(row));
        this.drawGuesses(row);
      }
      this.rows = [];
      this.text.append(fragment);
    }

    scroll() {
      if (this.stuck) this.pane.scrollTop = 1e9;
    }

    drawFigures() {
      const f = this.figures;
      if (!f) return;
      this.parts.rate.textContent = sd.number(f.tokens_per_second, 1);
      this.parts.tokens.textContent = `${f.tokens} of ${this.max} tokens`;
      this.parts.clock.textContent = `${f.seconds.toFixed(2)} s`;
      this.parts.bar.style.transform = `scaleX(${Math.min(1, f.tokens / this.max)})`;
      if (f.finish_reason) this.parts.state.textContent = ENDINGS[f.finish_reason];
    }

    /** The strip under the text: a pixel for each token and for each guess, which the browser stretches. */
    clearGuesses() {
      this.guesses.width = Math.min(this.max || 1, MAX_STRIP); // this also wipes it
      this.guesses.height = MAX_K;
      this.brush = this.guesses.getContext("2d");
      this.brush.fillStyle = getComputedStyle(this.guesses).color;
      this.written = 0;
    }

    drawGuesses([, k, tokens]) {
      const wide = this.guesses.width / (this.max || 1);
      const accepted = tokens.filter(([, code]) => code === "a").length;
      const emitted = tokens.filter(([, code]) => code && !"xu".includes(code)).length;
      for (const [height, alpha] of [[k, 0.4], [accepted, 1]]) {
        this.brush.globalAlpha = alpha;
        this.brush.fillRect(this.written * wide, MAX_K - height, emitted * wide, height);
      }
      this.written += emitted;
    }

    /** The tokens of a round that had a draft are wrapped, so that pointing at one shows them all. */
    round([index, k, tokens]) {
      const group = k ? sd.make("span", "sd-rd") : document.createDocumentFragment();
      for (const token of tokens) {
        const [text, code] = token;
        const span = sd.make("span", `tok ${code}`, text);
        if (/^\n+$/.test(text)) span.classList.add("nl");
        if (!text) span.classList.add("part");
        span.sdToken = { token, index, k };
        if (code) this.counts[code] += 1;
        group.append(span);
      }
      return group;
    }
  }

  /** The whole arena inside one gr.HTML. */
  class Race {
    constructor(element, trigger, server) {
      this.server = server;
      this.trigger = trigger;
      element.replaceChildren(sd.clone("sd-race"));
      element.classList.add("sd-arena");
      this.root = element;
      const find = (selector) => element.querySelector(selector);
      this.parts = { ratio: find(".sd-ratio"), sentence: find(".sd-sentence"), badge: find(".sd-badge") };
      this.parts.why = find(".sd-why-exact");
      this.parts.how = find(".sd-how");
      this.parts.spoken = find(".sd-spoken");
      this.parts.trace = find(".sd-trace");
      this.parts.again = find(".sd-again");
      this.lanes = { plain: new Lane("plain"), speculative: new Lane("speculative") };
      find(".sd-lanes").append(this.lanes.plain.node, this.lanes.speculative.node);
      this.legend(find(".sd-legend ul"));
      this.charts = new sd.Charts(element);
      this.hide = find(".sd-hide input");
      this.hide.addEventListener("change", () => element.classList.toggle("sd-hiding", this.hide.checked));
      this.parts.trace.addEventListener("click", () => this.download());
      this.parts.again.addEventListener("click", sd.showReplay);
      find(".sd-link").addEventListener("click", () => trigger("link"));
      sd.tooltips(element);
      this.say("idle");
    }

    legend(list) {
      this.legendCounts = {};
      for (const [code, name, words] of sd.KINDS) {
        const item = sd.make("li");
        item.tabIndex = 0;
        item.sdWhy = [name, words];
        item.append(sd.make("span", `tok ${code}`, name), (this.legendCounts[code] = sd.make("b", "", "0")));
        list.append(item);
      }
    }

    say(state) {
      this.state = state;
      this.root.dataset.state = state;
      this.root.closest("#stage")?.toggleAttribute("data-busy", this.busy); // how Stop looks; it can always be pressed
    }

    get busy() {
      return ["waiting", "loading", "running"].includes(this.state);
    }

    words(sentence, more = "") {
      this.parts.sentence.textContent = sentence;
      this.parts.badge.textContent = "";
      delete this.parts.badge.dataset.mark;
      this.parts.why.textContent = more;
    }

    /** Run was pressed; nothing has come back yet. */
    waiting() {
      if (this.busy) return;
      this.run = null;
      if (window.innerWidth <= NARROW) this.root.scrollIntoView({ behavior: "smooth" });
      this.say("waiting");
      this.words("Waiting for the model.", "If someone else is racing, your race starts after theirs.");
    }

    /** The run is over without a last message: it was cancelled or never got into the queue. */
    halted(sentence) {
      if (!this.busy) return;
      this.say("ended");
      this.words(sentence);
    }

    /** Stop was pressed, and the server had its time to end the race properly. A race that has begun ends by itself. */
    stop() {
      if (!this.busy) return;
      if (this.run) return this.words("Stopping after this step.");
      this.trigger("cancel");
      this.halted("Stopped.");
    }

    /** The run of this page. */
    follow(run) {
      this.run = run;
      this.source?.close();
      this.source = sd.listen(run, (message) => this.apply(message), () => this.fail(sd.UNREACHABLE));
    }

    apply(message) {
      if (message.status) this.status(message.status);
      if (message.start) this.start(message.start);
      for (const [name, news] of Object.entries(message.lanes || {})) this.lanes[name].take(news);
      if (message.end) this.finish(message.end);
      if (message.error && message.stopped) this.halted(message.error);
      else if (message.error) this.fail(message.error);
      if (message.end || message.error) this.source?.close();
      this.schedule();
    }

    status(status) {
      sd.showStatus(status);
      if (status.stage !== "loading") return;
      this.say("loading");
      this.words("The race starts as soon as the model is ready.", status.words);
    }

    start(request) {
      this.say("running");
      const max = request.settings.max_new_tokens;
      for (const lane of Object.values(this.lanes)) lane.clear(max);
      this.due = { figures: 0, charts: 0 };
      const { k, temperature } = request.settings;
      const drafts = request.drafter !== "none";
      this.lanes.speculative.title(drafts ? `With ${request.drafter}` : "With no drafter");
      this.parts.how.textContent = `at ${drafts ? `K ${k}, ` : ""}temperature ${temperature}`;
      this.charts.clear(drafts ? (k === "auto" ? 4 : k) : 0);
      this.parts.trace.disabled = this.parts.again.disabled = true;
      this.speed(null);
      this.parts.spoken.textContent = "";
      this.words(request.isolated ? "Running one lane after the other." : "Racing.", "Point at a token to see its test.");
    }

    finish(end) {
      this.draw();
      this.drawFigures(performance.now());
      this.speed(end.speed_up);
      this.words(end.stopped ? `Stopped. ${end.sentence}` : end.sentence, end.exactness.words);
      this.parts.badge.textContent = end.exactness.title;
      this.parts.badge.dataset.mark = end.exactness.mark;
      this.parts.spoken.textContent = `The race is over. ${end.sentence} ${end.exactness.title}.`;
      this.parts.trace.disabled = this.parts.again.disabled = false;
      this.traceRun = this.run;
      this.charts.show(end.stats, true);
      this.say("ended");
    }

    fail(sentence) {
      this.say("failed");
      this.speed(null); // it is of the race before
      this.words(sentence);
      this.parts.spoken.textContent = sentence;
    }

    speed(ratio) {
      this.parts.ratio.textContent = ratio ? `${ratio.toFixed(2)}×` : "–";
      this.parts.ratio.toggleAttribute("data-slower", Boolean(ratio) && ratio < 0.98);
    }

    /** All of it in the next frame, also the figures and charts that are drawn more seldom. */
    drawNow() {
      this.due = { figures: 0, charts: 0 };
      this.schedule();
    }

    schedule() {
      if (this.scheduled) return;
      this.scheduled = true;
      requestAnimationFrame(() => {
        this.scheduled = false;
        this.draw();
      });
    }

    draw() {
      const { plain, speculative } = this.lanes;
      const now = performance.now();
      plain.draw();
      speculative.draw();
      if (this.state === "running" && now >= this.due.figures) this.drawFigures(now);
      plain.scroll(); // after everything else, because it makes the browser lay out what has changed
      speculative.scroll();
    }

    drawFigures(now) {
      const { plain, speculative } = this.lanes;
      this.due.figures = now + FIGURES_MS;
      plain.drawFigures();
      speculative.drawFigures();
      for (const [code, node] of Object.entries(this.legendCounts)) {
        sd.put(node, String(speculative.counts[code]));
      }
      if (!plain.figures || !speculative.figures) return;
      this.speed(speedUp(plain.figures, speculative.figures));
      if (now < this.due.charts) return;
      this.due.charts = now + CHARTS_MS;
      this.charts.show({ plain: plain.figures, speculative: speculative.figures }, false);
    }

    async download() {
      const lines = await this.server.trace(this.traceRun);
      if (lines) return sd.save(lines, "specdemo-trace.jsonl", "application/x-ndjson");
      const gone = "This trace is no longer kept. Run the race again to download it.";
      this.parts.why.textContent = lines === null ? gone : sd.UNREACHABLE; // the result stays
    }
  }

  sd.Race = Race; // a replay has one of its own

  sd.mountRace = (element, props, watch, trigger, server) => {
    sd.race = new Race(element, trigger, server);
    watch("value", () => {
      const { run, error } = JSON.parse(props.value);
      if (run) sd.race.follow(run);
      else sd.race.fail(error);
    });
  };
})();
