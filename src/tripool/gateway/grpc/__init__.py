"""gRPC: calls on a port of its own, answered by the HTTP application as requests to these paths."""

GENERATE = "/tripool.v1.Generation/Generate"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
