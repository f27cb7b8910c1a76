"""`spec.generate` with a drafter that fails in one process, after some rounds: TROUBLE=how, PROCESS=where."""

import os
import sys
import time

from spec.draft.ngram import NgramDrafter
from spec.generate import main

propose, rounds = NgramDrafter.propose, 0


def troubled(*args):
    global rounds
    rounds += 1
    if rounds == 5 and os.environ["RANK"] == os.environ["PROCESS"]:
        if os.environ["TROUBLE"] == "error":
            print(f"fails at {time.time()}", file=sys.__stderr__, flush=True)
            raise RuntimeError("this drafter is broken")
        print("asleep", file=sys.__stderr__, flush=True)
        time.sleep(600)
    return propose(*args)


NgramDrafter.propose = troubled
sys.exit(main())
