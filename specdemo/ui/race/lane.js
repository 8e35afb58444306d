// One lane of an arena: its pane and the head above it. Text only ever becomes text nodes.
(() => {
  const sd = window.specdemo;
  const LANES = {
    plain: ["Target alone", "The target writes one token in every pass."],
    speculative: ["With a drafter", "The drafter proposes a few tokens, the target checks them all in one pass and keeps the good ones."],
  };
  const MAX_K = 16;
  const MAX_STRIP = 4096; // px; a longer text shares them
  const DRAFTS = ["The draft of each round", "Along the text: as high as the draft was long, and filled as far as its tokens passed."];
  const ENDINGS = { eos: "end of text", stop: "stop string", length: "limit reached" }; // it stands beside the number of tokens

  /** One lane: its pane and the head above it. Rows wait in `rows` until the next frame. */
  sd.Lane = class {
    constructor(name) {
      this.node = sd.clone("sd-lane").firstElementChild;
      this.node.dataset.lane = name;
      const find = (selector) => this.node.querySelector(selector);
      this.pane = find(".sd-pane");
      this.text = find(".sd-text");
      this.parts = { title: find("h2"), state: find(".sd-state"), rate: find(".sd-rate b"), bar: find(".sd-track i") };
      this.parts.tokens = find(".sd-tokens");
      this.parts.clock = find(".sd-clock");
      this.drafts = find(".sd-drafts canvas");
      this.drafts.tabIndex = 0;
      this.drafts.sdWhy = DRAFTS;
      this.title(LANES[name][0]);
      this.text.dataset.empty = LANES[name][1];
      this.pane.addEventListener("scroll", () => (this.stuck = this.atBottom()), { passive: true });
      this.clear();
    }

    title(text) {
      this.parts.title.textContent = text;
      this.pane.setAttribute("aria-label", `Text of the lane: ${text}`);
    }

    /** `rule` is the verification rule of the run that begins. */
    clear(max, rule) {
      this.max = max;
      this.rule = rule;
      this.rows = [];
      this.figures = null;
      this.stuck = true;
      this.counts = { a: 0, r: 0, b: 0, t: 0, x: 0, u: 0 };
      this.text.replaceChildren();
      this.clearDrafts();
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
        this.drawDrafts(row);
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

    /** The strip under the text: a pixel for each token, emitted or drafted, which the browser stretches. */
    clearDrafts() {
      this.drafts.width = Math.min(this.max || 1, MAX_STRIP); // this also wipes it
      this.drafts.height = MAX_K;
      this.brush = this.drafts.getContext("2d");
      this.brush.fillStyle = getComputedStyle(this.drafts).color;
      this.written = 0;
    }

    drawDrafts([, k, tokens]) {
      const wide = this.drafts.width / (this.max || 1);
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
        span.sdToken = { token, index, k, rule: this.rule, own: tokens.at(-1) };
        if (code) this.counts[code] += 1;
        group.append(span);
      }
      return group;
    }
  };
})();
