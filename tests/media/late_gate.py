"""Image workers on a busy machine: their first message takes longer than an order may, for
`test_worker_start.py`.
"""

from __future__ import annotations

import socket
import sys
import time

from saccade.media.workers import supervisor, thread_gate
from saccade.media.workers.supervisor import ORDER_SECONDS

send_listener_fd = thread_gate.send_listener_fd


def send_late(connection: socket.socket) -> bool:
    time.sleep(ORDER_SECONDS + 0.5)
    return send_listener_fd(connection)


if __name__ == "__main__":
    thread_gate.send_listener_fd = send_late
    sys.exit(supervisor.main())
