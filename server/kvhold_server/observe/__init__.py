"""What people and Prometheus see of a daemon: one snapshot, the metric table, the node page. Reads; changes nothing."""
