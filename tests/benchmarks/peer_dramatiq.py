"""What dramatiq's own command line loads; the socket is in PEER_SOCKET."""

import os

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

_server = redis.Redis(unix_socket_path=os.environ["PEER_SOCKET"])
_broker = RedisBroker(client=_server)
_broker.add_middleware(Results(backend=RedisBackend(client=_server)))
dramatiq.set_broker(_broker)


@dramatiq.actor(store_results=True)
def handle(n: int) -> dict:
    return {"n": n}
