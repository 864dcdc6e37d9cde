"""The daemon without its wires: planner, pools, sessions and memory under one owner. No protobuf, no sockets."""
