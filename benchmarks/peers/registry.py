"""All peers, in the order of the rows."""

from __future__ import annotations

from benchmarks.peers import autograd, bergson_peer, gram_ghost, kronfluence_peer
from benchmarks.peers.peer import Peer

ALL: tuple[Peer, ...] = (
    *autograd.PEERS,
    *gram_ghost.PEERS,
    *kronfluence_peer.PEERS,
    *bergson_peer.PEERS,
)
BY_NAME = {peer.name: peer for peer in ALL}
