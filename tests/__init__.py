"""Tests lie by what they need, and below that by the rooms of `src`.

    unit         nothing but this process, and servers on loopback that are made here
    simulation   real code on a simulated log and clock: what a seed does, it does again
    integration  a broker, Redis, Spark or a browser, and no whole pipeline
    system       a whole pipeline; most tests share one (`live`)
    hostile      kills, full disks, lost brokers, clocks that are set
    support      all that they share

A folder marks its tests (`conftest.py`), and a test says by itself that it is `slow`. This is a
package, so that each of its modules has one name.
"""
