"""Planning gives way: on busy cores the threads that send what is due come first.

What lateness is left on a warm pipeline sits where the next window is planned, a burst of some 100
ms on one core. Planning has a second for that; a message that is due has none. So the threads that
plan are made nicer to the rest of the process, as `renice` would. Only where driver and executors
share a JVM, on Linux; elsewhere nothing happens.
"""

import os
from pathlib import Path

#: A third of the others' share when cores are short; all of them otherwise. More would let a
#: window's planning miss its time on a machine that is always full.
NICENESS = 5

#: How the names of the JVM's threads begin in which py4j runs Python's calls, and Spark plans. Not
#: the compiler's: the sooner code is compiled, the less of everything there is to do.
NICE_THREADS = ("Thread-",)


def let_planning_give_way(jvm: int) -> None:
    """Lower the priority of the threads that plan, in the JVM with this process id.

    Safe to repeat, and to be repeated: threads come and go.
    """
    lowered = os.getpriority(os.PRIO_PROCESS, jvm) + NICENESS
    for thread in Path(f"/proc/{jvm}/task").glob("*"):
        try:
            if (thread / "comm").read_text().startswith(NICE_THREADS):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), lowered)
        except OSError:
            continue  # it has ended, or this is no Linux
