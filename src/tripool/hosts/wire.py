"""What hosts ask of each other, once they have authenticated. A connection carries requests of one client, in order.

| request | answer |
|---|---|
| Join | Joined, or No: may this worker come, and what does it need to know? |
| ReadFile | Data and that many bytes: a part of a checkpoint |
| JoinGateway | Data and that many bytes, or No: what a gateway of another host needs to know (`Serving`) |
| ToCoordinator | Data, then bytes in both directions: a connection of a worker or of a gateway to the coordinator |
| AskMember | Reply: what a cache member answers to a question about itself |
| ReadSlots | Data and the slots' bytes: KV, from the sender's arena |
| FindBlocks | FoundBlocks and their bytes: a cached prefix |
| StoreBlocks | Taken; then the client sends the bytes of what was taken, and gets Data when they are stored |
| Present | Directory: a host is there, and what it has; repeated |
| TryHost | Data, or No: can you reach this address? |
| Meet | Data, or No: are you that host? An address may lead to another one from elsewhere |
| TakeRanks | Ranks: what a joining host shall run of an instance |
| OpenExchange | Data, or No; then frames of the client: rows for ranks of this host, and answers (`hosts/experts.py`) |
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tripool.cache.records import Block
from tripool.cache.wire import MAX_KEYS, Key, Keys
from tripool.control.topology import Machine
from tripool.messages import Checksum, FileName, Name, Natural, Positive, Role, Small
from tripool.text.files import TextFiles

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Address = Annotated[str, msgspec.Meta(max_length=256)]
TransferName = Literal["tcp", "mooncake"]
CoordinatorSocket = Literal["workers", "gateways"]
"""Where the coordinator of a run listens for which."""
_FEW = msgspec.Meta(max_length=MAX_KEYS)
_HOSTS = msgspec.Meta(max_length=1024)
MAX_LINKS = 8
MAX_PART_BYTES = 2**23
"""Of a file, in one request."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    name: FileName
    num_bytes: Natural
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Host(msgspec.Struct, frozen=True, array_like=True):
    """One host of a run, as the others know it."""

    name: Name
    address: Address
    """Where the others reach it; empty: they do not."""
    members: dict[Text, Annotated[tuple[Name, ...], _HOSTS]] = {}
    """Its cache members, by model."""
    roles: tuple[Role, ...] = ()
    """Of its workers."""
    links: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()
    """Its other addresses: who reaches them may use them beside the first."""
    machine: Machine = Machine()
    ranks: dict[Name, Annotated[tuple[Small, ...], _HOSTS]] = {}
    """What it has of instances that are spread over hosts."""


# ---- requests ----------------------------------------------------------------------------------------------------


class Join(_Message, frozen=True):
    version: Text
    code: Text
    """Digest of the code that computes: tokens are the same only with the same."""
    clock_s: float
    model: Text
    """Empty: the server's first."""
    role: Annotated[str, msgspec.Meta(pattern="^(prefill|decode|any)$")]


class ReadFile(_Message, frozen=True):
    model: Text
    name: FileName
    offset: Natural
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_BYTES)]


class JoinGateway(_Message, frozen=True):
    version: Text
    code: Text


class ToCoordinator(_Message, frozen=True):
    socket: CoordinatorSocket = "workers"


class AskMember(_Message, frozen=True):
    member: Name
    question: Annotated[bytes, msgspec.Meta(max_length=2**18)]
    """GetStats, Purge or Quotas of `cache.wire`."""


class ReadSlots(_Message, frozen=True):
    arena: FileName
    block_bytes: Positive
    slots: Annotated[tuple[Small, ...], _FEW]


class FindBlocks(_Message, frozen=True):
    member: Name
    namespace: Key
    keys: Keys


class StoreBlocks(_Message, frozen=True):
    member: Name
    namespace: Key
    keys: Keys
    depths: Annotated[tuple[Small, ...], _FEW]
    form: Small
    sizes: Annotated[tuple[Positive, ...], _FEW]
    checksums: Annotated[tuple[Checksum, ...], _FEW]


class Present(_Message, frozen=True):
    host: Host


class TryHost(_Message, frozen=True):
    address: Address


class Meet(_Message, frozen=True):
    host: Name


class TakeRanks(_Message, frozen=True):
    model: Text
    host: Host


class OpenExchange(_Message, frozen=True):
    instance: Name
    host: Name
    """The client's."""


MAX_SERVING_BYTES = 2**28


class Serving(msgspec.Struct, frozen=True):
    """What a gateway needs to know of its server, beside what the coordinator says."""

    models: tuple[ServedText, ...]
    """The first is the default."""
    is_open: bool
    """Whether no API key is asked for."""


class ServedText(msgspec.Struct, frozen=True):
    name: str
    text: TextFiles


# ---- answers -----------------------------------------------------------------------------------------------------


class No(_Message, frozen=True):
    step: Text
    message: Text
    hint: Text


class Data(_Message, frozen=True):
    num_bytes: Natural = 0


class Joined(_Message, frozen=True):
    model: Text
    identity: Text
    files: Annotated[tuple[ModelFile, ...], _FEW]
    """Empty: a model without files."""
    role: Role
    options: Annotated[tuple[Text, ...], _HOSTS]
    """Of the engine: the same on every host."""
    clock_s: float
    path: Text
    """What a worker is given for a model without files."""
    transfer: TransferName = "tcp"
    second_copy: bool = False
    takes_ranks: bool = False
    """An instance of its role has ranks on several hosts: TakeRanks tells which this one shall have."""


class FoundBlocks(_Message, frozen=True):
    blocks: Annotated[tuple[Block, ...], _FEW]


class Reply(_Message, frozen=True):
    data: bytes
    """Empty: it did not answer."""


class Taken(_Message, frozen=True):
    positions: Annotated[tuple[Small, ...], _FEW]


class Directory(_Message, frozen=True):
    hosts: Annotated[tuple[Host, ...], _HOSTS]


class Ranks(_Message, frozen=True):
    """Without an instance: no ranks are missing, and the host has a worker of its own."""

    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    ranks: Annotated[tuple[Small, ...], _HOSTS] = ()
    attention_ranks: Small = 0
    """The first ones have sequences; those after them have experts only."""
    shape: dict[Name, Positive] = {}
    """Of the exchange: the fields of its layout."""
    reason: Text = ""


Request = (
    Join | JoinGateway | ReadFile | ToCoordinator | AskMember | ReadSlots | FindBlocks | StoreBlocks | Present | TryHost
    | Meet | TakeRanks | OpenExchange
)  # fmt: skip
Answer = No | Data | Joined | FoundBlocks | Taken | Reply | Directory | Ranks
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
