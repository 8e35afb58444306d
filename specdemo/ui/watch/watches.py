"""Which pages share their races, and the messages of these races as their watchers get them."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Container

from ...racing.game import MOST_GUESSES
from ..jobs import Job
from ..race.run import RaceRun
from ..runs import Runs

BETWEEN_VOTES = 0.5  # seconds, of one voter
MOST_KNOWN = 4 * MOST_GUESSES  # voters of a watch who may be away for a moment


class Feed:
    """The messages of one race as server-sent events, each made once for all watchers.

    `first` is the number of its first event, and `next` the feed of the race that followed, if there was one.
    """

    def __init__(self, race: RaceRun | None, first: int) -> None:
        """`race` is None as long as the page has run none."""
        self.race, self.first = race, first
        self.next: Feed | None = None
        self.events: list[bytes] = []

    def update(self) -> list[bytes]:
        """The events so far. In the server's event loop."""
        race_id, messages = (self.race.id, self.race.messages) if self.race else ("", [])
        for message in messages[len(self.events) :]:
            public = message.replace(race_id, "", 1)  # whoever knows it can stop the race and download its trace
            self.events.append(f"id: {self.first + len(self.events)}\ndata: {public}\n\n".encode())
        return self.events


class Ballot:
    """A vote on what the target writes next, open while a watch has it: one guess of each voter, who may change it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._votes = dict[str, tuple[float, str]]()  # by voter: when, by the monotonic clock, and the guess

    def take(self, voter: str, guess: str, present: Container[str]) -> bool:
        """Whether the vote counts: it does not come too soon after the voter's last. A full ballot forgets voters who
        are not `present`, or whoever comes and goes could fill it."""
        now = time.monotonic()
        if voter in self._votes:
            if now - self._votes[voter][0] < BETWEEN_VOTES:
                return False
        elif len(self._votes) >= MOST_GUESSES - 1:
            self._votes = {name: kept for name, kept in self._votes.items() if name in present}
            if len(self._votes) >= MOST_GUESSES - 1:
                return False
        self._votes[voter] = now, guess
        return True

    @property
    def guesses(self) -> dict[str, str]:
        """By voter."""
        return {voter: guess for voter, (_, guess) in self._votes.items()}


class Watch:
    """A page that shares its races. Its token cannot be guessed: it is all that a watcher needs.

    Each of `followers` is called for every message of a race and when the sharing ends.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self.token = secrets.token_urlsafe(16)
        self.watchers = 0
        self.voters = Counter[str]()  # those among the watchers who can vote, by their ids, which are their own
        self.known = dict[str, None]()  # the last who could, the newest last: they may be back in a moment
        self.ballot: Ballot | None = None
        self.ended = False
        self.followers: set[Callable[[], None]] = set()
        self.feed = Feed(None, 0)
        self._ballots = 0

    def begin(self, race: RaceRun) -> None:
        """The session's race that is watched from now on. The one before it has ended."""
        before = self.feed
        if race is before.race:
            return
        self.feed = before.next = Feed(race, before.first + (len(before.race.messages) if before.race else 0))
        race.watchers.add(self.notify)
        self.notify()

    def end(self) -> None:
        """Nothing more is shown."""
        self.ended = True
        if self.feed.race:
            self.feed.race.watchers.discard(self.notify)
        self.notify()

    def admit(self, voter: str) -> None:
        """Let a watcher vote who has come."""
        self.voters[voter] += 1
        self.known.pop(voter, None)
        self.known[voter] = None
        if len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]

    def open(self) -> None:
        """Ask the watchers for a vote; the one before it is forgotten."""
        self._ballots += 1
        self.ballot = Ballot(self._ballots)
        self.notify()

    def close(self) -> list[str]:
        """End the vote, and return the guesses."""
        ballot, self.ballot = self.ballot, None
        self.notify()
        return [*ballot.guesses.values()] if ballot else []

    def notify(self) -> None:
        for follower in tuple(self.followers):
            follower()


class Watches:
    """The pages that share their races, by token. A session shares at most once at a time, until its page is closed."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._shared: dict[str, Watch] = {}  # by session
        self._lock = threading.Lock()
        runs.begun, runs.left = self._begun, self._left

    def share(self, session: str) -> Watch | None:
        """Share the races of a session from its latest one on; None if it has no page here that is open."""
        with self._lock:
            if not self._runs.is_present(session):
                return None
            watch = self._shared.setdefault(session, Watch(session))
            if race := self._runs.latest(session, RaceRun):
                watch.begin(race)
            return watch

    def find(self, token: str) -> Watch | None:
        """What is watched with a token, if it is still shared."""
        with self._lock:
            return next((watch for watch in self._shared.values() if watch.token == token), None)

    def end(self, watch: Watch) -> None:
        with self._lock:
            self._shared.pop(watch.session, None)
        watch.end()

    def _begun(self, job: Job) -> None:
        with self._lock:
            watch = self._shared.get(job.session)
            if watch and isinstance(job, RaceRun):
                watch.begin(job)

    def _left(self, session: str) -> None:
        """End what a session shares, unless its page is back in a moment: it may have lost the connection."""
        if watch := self._shared.get(session):

            def look() -> None:
                if not self._runs.is_present(session) and not watch.ended:
                    self.end(watch)

            asyncio.get_running_loop().call_later(self._runs.grace, look)
