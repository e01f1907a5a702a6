"""What people would pick instead of us, measured in turns with us in the same run.

    python tests/benchmarks/peers.py [--quick] [--keep NAME]

The peers' libraries come into an environment of their own, in the user's cache directory; their servers are those of
the system's packages, on Unix sockets in a temporary directory. What is missing is named, and left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import table
from peer_servers import HAND_OVERS, LOCKS, QUEUES

WITH_PEERS = ("slots", "jobs-async", "jobs-plain", "jobs-ahead", "job-trip", "slot-hand-over")


def main() -> None:
    print(f"{'':20} {'fsyncs':16} keeps results")
    print(f"{'runstated':20} {'each result':16} until their run ends")
    for peer in (*LOCKS, *HAND_OVERS, *QUEUES):
        print(f"{peer.name:20} {peer.fsyncs:16} {peer.keeps or '-'}")
    print()
    table.main(WITH_PEERS)


if __name__ == "__main__":
    main()
