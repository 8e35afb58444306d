"""A child of `system.trial`: each name says what becomes of it. Its input is a file that notes what was tried."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def main() -> None:
    notes = sys.stdin.read()
    for place, name in enumerate(sys.argv[1:]):
        with open(notes, "a", encoding="utf-8") as file:
            file.write(f"{name} ")
        if name == "cannot begin":
            sys.exit(1)
        if not place:
            print("begun", flush=True)
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "compiler":  # which hangs, and has the output of the child
            subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)
        if name == "poisoned":
            print(json.dumps({name: "gives other numbers"}), flush=True)
            os.abort()
        if name == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        if name == "short of memory":
            print(json.dumps({name: None}), flush=True)
            continue
        if name == "chatty":
            print("null", flush=True)
        if name == "hang":
            time.sleep(600)
        if name == "silent":
            return
        if name == "slow":
            for _ in range(8):
                time.sleep(0.25)
                print(flush=True)
        wrong = "gives other numbers" if name == "wrong" else ""
        print(json.dumps({name: wrong}), flush=True)
        if wrong:
            return


if __name__ == "__main__":
    main()
