"""One file per gRPC service: decode, call the node, encode. No decisions."""
