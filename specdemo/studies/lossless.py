"""Is it lossless? Texts token for token, the emitted distribution on paper, and by sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..racing.compare import is_comparable
from ..settings import COMMAND, FORM, SETTINGS, Field, Settings
from ..system.imports import LazyModule
from .plots import Axis, Plot, Section
from .prompts import Prompt
from .statistics import CONFIDENCE, special
from .study import (
    DRAFTER,
    DRAFTERS,
    KS,
    NEW_TOKENS,
    PROMPT,
    PROMPT_FILE,
    PROMPT_FILES,
    SEED,
    TEMPERATURES,
    Study,
    form_and_command,
    k_field,
    temperature_field,
)
from .summaries import Row, summarise
from .tables import table

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import race
    from ..servers import address, dialects, llamacpp
    from . import distributions, greedy, rules
else:
    race = LazyModule("specdemo.racing.race")
    address = LazyModule("specdemo.servers.address")
    dialects = LazyModule("specdemo.servers.dialects")
    llamacpp = LazyModule("specdemo.servers.llamacpp")
    greedy = LazyModule("specdemo.studies.greedy")
    distributions = LazyModule("specdemo.studies.distributions")
    rules = LazyModule("specdemo.studies.rules")

DESCRIPTIONS = {  # of the broken rules of `rules`
    "accept-if-p-exceeds-q": "A guess is accepted only if p > q",
    "resample-from-p": "A rejected token is replaced by a draw from p, not from the residual",
    "likeliest-by-ratio": "The drafter's likeliest token is tested as if it had been drawn from q",
    "noise-used-twice": "The random numbers of a position are used again at the next",
}
FILE = PROMPT_FILES / "domains.jsonl"
SKIPPED, AGAINST = "0 skips this check.", "Also check the target alone against"
ROUNDS = Field("rounds", "Samples", "whole", high=20_000, help=f"Rounds to sample. {SKIPPED}")
over_samples = partial(Plot, at="rounds", x=Axis("samples"))
TEXTS = Plot(
    "Texts that are the target's own",
    "Texts that equal those of the target alone, token for token. The whisker adds texts that first differ at a "
    "near-tie.",
    {"same": ""},
    Axis("share of the texts", ".0%", end=1),
    "name",
)
OVERLAP = Plot(
    "The chance that a guess is accepted",
    "How much the drafter's and the target's probabilities overlap, at each guess of one text.",
    {"overlap": "overlap of p and q"},
    Axis("chance", ".0%", end=1),
    "number",
    Axis("guess, along the text"),
)
LIKELIEST = Plot(
    "The likeliest first tokens",
    "How often each token came, and the target's own probability of it. Whiskers: 95% confidence interval.",
    {"share": ""},
    Axis("share of the samples", ".1%"),
    "text",
    rule=("probability", "the target's own probability"),
)
DISTANCE = over_samples(
    "How far off the frequencies are",
    "Total variation: half the sum of all differences. A correct rule falls together with samples of the target "
    "itself. A broken rule stays above them.",
    {
        "total_variation": "with the drafter",
        "floor_1": "the target itself, sample 1",
        "floor_2": "the target itself, sample 2",
    },
    Axis("total variation", ".3f"),
)
CHANCE = over_samples(
    "Could that be chance?",
    "How often a fair sample is at least this far off (chi-square test). Below the dotted line, a difference is not "
    "chance.",
    {"p_value": ""},
    Axis("p-value", "p", 1e-12, 1, "log"),
    by="name",
    rule=("caught", "caught"),
)


class Lossless(Study):
    """Does drafting change what the model says? Three checks answer this. At temperature 0 every text must be the
    target's own, token for token. Above 0 the probabilities of every next token must be the target's own. They are
    first computed from the model's probabilities, then estimated by sampling thousands of rounds. Pick a broken rule
    and watch the test catch it.
    """

    name = "lossless"
    title = "Is it lossless?"
    summary = (
        "Check that drafting changes nothing: texts token for token, and sampled tokens by their distribution.\n\n"
        "Texts are compared at every temperature under the match rule, at temperature 0 under rejection sampling. Ends "
        "with status 1 if a check fails."
    )
    by_eager = True
    fields = (
        replace(DRAFTERS, kind="text", value="", shown_in=COMMAND),
        DRAFTER,
        replace(SETTINGS["rule"], label="Verification rule"),
        Field(
            "broken",
            "Broken rule to sample with",
            "choice",
            "",
            choices={"": "None: the rule above", **DESCRIPTIONS},
            in_sentences="The broken rule",
            help="Sample by a broken rule, to see the test catch it.",
        ),
        replace(k_field(2), shown_in=FORM),
        replace(temperature_field(1.0, 0.05), shown_in=FORM),
        replace(KS, value="2"),
        replace(TEMPERATURES, value="0,1"),
        *(replace(SETTINGS[name], shown_in=COMMAND) for name in ("top_k", "top_p", "tree")),
        SEED,
        *form_and_command(ROUNDS, 1600, 3000),
        Field("prompts", "Prompts at temperature 0", "whole", 4, 0, 24, shown_in=FORM),
        replace(PROMPT_FILE, value=FILE),
        Field("limit", "", "whole", 8, help=f"Prompts whose texts are compared. {SKIPPED}", shown_in=COMMAND),
        replace(PROMPT, help="The prompt whose answer is the context."),
        Field("transformers", "", "switch", True, help=f"{AGAINST} transformers.", shown_in=COMMAND),
        Field("server", "", "address", "", help=f"{AGAINST} llama.cpp's server of the same file.", shown_in=COMMAND),
        Field("server_key", "", "key", "", shown_in=COMMAND),
        replace(NEW_TOKENS, shown_in=COMMAND),
    )
    plots = ((TEXTS,), (OVERLAP,), (LIKELIEST, DISTANCE, CHANCE))

    @classmethod
    def needs_models(cls, chosen: Mapping[str, Any]) -> bool:
        return True  # also where a server is compared with them

    @classmethod
    def check_options(cls, chosen: Mapping[str, Any]) -> None:
        every = cls._settings(chosen)
        if chosen["rounds"] and not any(one.temperature for one in every):
            raise BadInput("At temperature 0 nothing is sampled: choose one above 0, or --rounds 0.")
        if chosen["broken"]:
            rules.make_rule(every[0], chosen["broken"])
            if every[0].tree:
                raise BadInput("The broken rules test chains: leave out --broken or --tree.")

    @staticmethod
    def _settings(chosen: Mapping[str, Any]) -> list[Settings]:
        """Those of the texts and samples; on the page those of the texts come first."""
        if "ks" not in chosen:
            k, temperature, rule = (chosen[name] for name in ("k", "temperature", "rule"))
            return [Settings(k, max_new_tokens=48), Settings(k, temperature, max_new_tokens=64, rule=rule)]
        shared = {name: chosen[name] for name in ("top_k", "top_p", "seed", "rule", "tree", "max_new_tokens")}
        every = product(chosen["ks"], chosen["temperatures"])
        return [Settings(k=k, temperature=temperature, **shared) for k, temperature in every]

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        self.checks: list[Row] = []
        self.places: list[distributions.DraftOnPaper] = []
        self.history: list[distributions.Samples] = []
        self.no_samples = ""  # why none could be rolled
        named = chosen.get("drafters")
        self.drafters = race.drafters_of(loaded, named) if named else [chosen["drafter"]]
        self.settings = self._settings(chosen)
        first = self.settings[:1] if "ks" not in chosen else self.settings
        self.compared = [one for one in first if is_comparable(one)]
        self.sampled = next((one for one in self.settings if one.temperature), None)
        self.texts = self._texts(chosen)
        self.transformers = chosen.get("transformers", True)
        texts = sum(
            greedy.steps(self.texts, self.drafters, self.transformers and not one.temperature) for one in self.compared
        )
        batches = -(-chosen["rounds"] // distributions.BATCH)
        served = len(self.texts) if chosen.get("server") else 0
        self.steps = texts + served + 1 + (batches + 1 if batches else 0)

    def _texts(self, chosen: Mapping[str, Any]) -> Sequence[Prompt]:
        """As many prompts as were asked for, from the whole file."""
        count = chosen.get("limit", chosen["prompts"])
        if not count:
            return []
        able = self.readable(super().prompts(FILE.stem))
        return able[:: max(1, len(able) // count)][:count]

    def run(self) -> Iterator[str]:
        for settings in self.compared:
            for check in greedy.greedy(self.loaded, self.texts, self.drafters, settings, self.transformers):
                self.checks.append(check)
                self.done += 1
                yield f"Comparing texts at temperature {settings.temperature:g}"
        if self.chosen.get("server"):
            yield from self._with_server()
        if self.sampled:
            yield from self._sample(self.sampled)

    def _with_server(self) -> Iterator[str]:
        where = address.Address.read(self.chosen["server"])
        with dialects.connected(where, self.chosen.get("server_key")) as server:
            if not isinstance(server, llamacpp.LlamaCpp):
                raise BadInput("--server takes a server of llama.cpp here.")
            for check in greedy.against_server(self.loaded, server, self.texts, self.settings[0].max_new_tokens):
                self.checks.append(check)
                self.done += 1
                yield "Comparing texts with the server"

    def _sample(self, settings: Settings) -> Iterator[str]:
        """Compute and roll what the first drafter emits."""
        drafter, ids, broken = self.drafters[0], self.loaded.encode(self.chosen["prompt"]), self.chosen["broken"]
        if not settings.tree:  # whose tokens are tested by nothing but the target's own draws
            for places in distributions.exact(self.loaded, drafter, ids, settings, broken):
                self.places.append(places)
                yield "Working out the distribution"
        self.done += 1
        if not self.chosen["rounds"]:
            return
        try:
            context = distributions.telling_context(self.loaded, drafter, ids, settings)
        except BadInput as error:  # what was found so far stands
            self.no_samples = str(error)
            return
        self.done += 1
        yield "Found a telling place in the text"
        for sampled in distributions.sampling(self.loaded, drafter, context, settings, self.chosen["rounds"], broken):
            self.history.append(sampled)
            self.done += 1
            yield "Sampling"

    @property
    def failed(self) -> bool:
        wrong = any(place.error > distributions.PRECISION for draft in self.places for place in draft.positions)
        differ = not all(check["identical"] or check["near_tie"] for check in self.checks)
        return wrong or differ or any(sampled.caught for sampled in self.history[-1:])

    def words(self) -> list[str]:
        lines = [*greedy.in_words(self.checks), *greedy.differences_in_words(self.checks)]
        if self.sampled and not self.sampled.tree:
            lines += distributions.exact_in_words(self.places)
        lines += [line for sampled in self.history[-1:] for line in sampled.in_words()]
        return [*lines, *filter(None, [self.no_samples])]

    def rows(self) -> list[dict[str, Any]]:
        sampled = [
            {"part": "sampling", "rounds": sampled.rounds, "rule": sampled.rule, **asdict(test)}
            for sampled in self.history
            for test in sampled.tests
        ]
        sampled = [{**row, "floor": {str(n): sample for n, sample in enumerate(row["floor"], 1)}} for row in sampled]
        return [{"part": "texts", **check} for check in self.checks] + sampled

    def result(self) -> dict[str, Any]:
        last = self.history[-1] if self.history else None
        chosen = {"settings": self.settings, "drafters": self.drafters}
        return {**chosen, "texts": self.checks, "exact": self.places, "sampling": last}

    def sections(self) -> list[Section | None]:
        none = Section(words=[self.no_samples], title="Nothing was sampled") if self.no_samples else None
        return [
            self._of_texts() if self.checks else None,
            self._on_paper() if self.places else None,
            self._by_sampling() if self.history else none,
        ]

    def _of_texts(self) -> Section:
        columns = (
            ("prompt_id", "prompt", ""),
            ("text", "compared with the target alone", ""),
            ("tokens", "tokens", ",.0f"),
            ("identical", "the same", "yes"),
            ("first_difference", "the same until token", ",.0f"),
            ("margin", "tokens apart there", ".3f"),
            ("near_tie", "near-tie", "yes"),
        )
        rows = []
        for row in summarise(self.checks, ("text",), greedy.FIGURES):
            same, ties = (row[name] / row["texts"] for name in ("same", "ties"))
            rows.append({"name": row["text"], "same": same} | ({"low": same, "high": same + ties} if ties else {}))
        every = table("Every text", columns, self.checks)
        title = "1. At temperature 0, token for token"
        return Section("", greedy.in_words(self.checks), [(TEXTS, rows)], [every], title)

    def _on_paper(self) -> Section:
        places = [place for draft in self.places for place in draft.positions]
        rows = [{"number": number, "overlap": place.overlap} for number, place in enumerate(places, 1)]
        verdict, *words = distributions.exact_in_words(self.places)
        columns = (("rule", "verification rule", ""), ("accepted", "tokens accepted of a draft, on average", ".2f"))
        means = [{"rule": name, "accepted": mean} for name, mean in distributions.accepted_means(self.places).items()]
        accepted = table("What each rule accepts of these drafts", columns, means)
        return Section(verdict, words, [(OVERLAP, rows)], [accepted], f"2. On paper{self._broken}")

    def _by_sampling(self) -> Section:
        """All results so far are drawn, the table has the last."""
        columns = (
            ("tokens", "tokens", ",.0f"),
            ("cells", "outcomes", ",.0f"),
            ("total_variation", "total variation", ".3f"),
            ("kl", "KL, nats", ".3f"),
            ("jensen_shannon", "Jensen-Shannon, nats", ".3f"),
            *((f"floor_{n}", f"total variation of the target itself, sample {n}", ".3f") for n in (1, 2)),
            ("p_value", "p-value", "p"),
            ("smallest_caught", "smallest total variation caught in 95% of such runs", ".3f"),
        )
        rows = [
            {"rounds": sampled.rounds, "caught": distributions.CAUGHT, **asdict(test), **asdict(test.distances)}
            | {"name": "first token" if test.tokens == 1 else "first two tokens"}
            | {f"floor_{n}": sample.total_variation for n, sample in enumerate(test.floor, 1)}
            for sampled in self.history
            for test in sampled.tests
        ]
        last = self.history[-1]
        likeliest = [self._likely(likely, last.rounds) for likely in last.likeliest]
        plots = [(LIKELIEST, likeliest), (DISTANCE, [row for row in rows if row["tokens"] == 1]), (CHANCE, rows)]
        *words, verdict = last.in_words()
        distances = table("Distances", columns, rows[-len(last.tests) :])
        return Section(verdict, words, plots, [distances], f"3. By sampling{self._broken}")

    @property
    def _broken(self) -> str:
        return ", with a rule broken on purpose" if self.chosen["broken"] else ""

    def _likely(self, likely: distributions.LikelyToken, rounds: int) -> dict[str, Any]:
        text, share, p = self.loaded.tokenizer.decode([likely.token_id]), likely.count / rounds, likely.probability
        half = -special.ndtri((1 - CONFIDENCE) / 2) * (p * (1 - p) / rounds) ** 0.5
        row = {"text": json.dumps(text, ensure_ascii=False), "share": share, "probability": p}
        return {**row, "low": max(0.0, share - half), "high": min(1.0, share + half)}
