"""What the metrics listener serves; see observe/routes.py."""

from kvhold_server.http import HttpHandler
from kvhold_server.node.node import Node
from kvhold_server.observe.routes import Observatory
from kvhold_server.rpc.services.plans import server_version


def make_routes(node: Node) -> dict[str, HttpHandler]:
    """Path → handler."""
    return Observatory(node, server_version()).routes()
