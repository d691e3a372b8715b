"""The message types of `tripool.proto`, made from its compiled descriptor.

Code that protoc generates refuses to run with an older protobuf than its own compiler's. The descriptor works with
every version, so that the extra fits into environments that have one already.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SET = descriptor_pb2.FileDescriptorSet.FromString((files(__package__) / "tripool.binpb").read_bytes())
_POOL = descriptor_pool.Default()  # the one that reflection looks in
_POOL.Add(_SET.file[0])
PACKAGE: str = _SET.file[0].package


def _type(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


GenerateRequest, GenerateReply = _type("GenerateRequest"), _type("GenerateReply")
