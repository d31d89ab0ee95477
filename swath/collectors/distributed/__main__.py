"""`python -m swath.collectors.distributed ADDRESS PORT INDEX GENERATION`: be a node of the trainer that listens there.

The secret of the run is the first line of the standard input.
"""

import sys

from swath.collectors.distributed.meeting import Invitation

address, port, index, generation = sys.argv[1:]
Invitation(address, int(port), bytes.fromhex(sys.stdin.readline()), int(index), int(generation)).accept()
