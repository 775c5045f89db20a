"""A real Ray cluster of two nodes on this machine, for an interpreter with Ray: each node has an address and a CPU.

Prints the cluster's address. A line on stdin kills the second node's daemon and adds a third node; the end of stdin
ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

# the first node has the machine's own address, in whose place Ray would put 127.0.0.1
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
print(cluster.address, flush=True)
for _ in sys.stdin:
    cluster.remove_node(second, allow_graceful=False)
    second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    print("lost", flush=True)
cluster.shutdown()
