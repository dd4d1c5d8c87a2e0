"""A Flower grid in this process: messages go through Flower's own serialisation to a client app and back."""

import time
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from federated_problem import client
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what a SuperLink sets


class Building:
    """Picklable: client p of the small problem, in its own folder."""

    def __init__(self, folder, method=None, **options):
        self.folder, self.method, self.options = folder, method, options

    def __call__(self, context):
        number = context.node_config["partition-id"]
        method = None if self.method is None else self.method()
        return client(method, number, folder=self.folder / str(number), **self.options)


class LocalGrid(Grid):
    """Nodes 100, 101, ...; `hooks[(kind, node)]` may spoil or drop a message before it is delivered."""

    def __init__(self, app, clients):
        self.app = app
        self.contexts = {100 + p: self.context(100 + p, p) for p in range(clients)}
        self.away, self.sent, self.replies = set(), [], []

    @staticmethod
    def context(node, number):
        return Context(
            run_id=1, node_id=node, node_config={"partition-id": number}, state=RecordDict(), run_config={}
        )

    set_run = create_message = push_messages = pull_messages = run = None  # of no use here

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            self.sent.append((kind, node, message.content))
            if node in self.away or (kind, node) in self.away:
                time.sleep(0)
                continue
            replies.append(self.deliver(kind, node, message.content))
        self.replies += [(reply.metadata.src_node_id, reply.content) for reply in replies]
        return replies[::-1]  # in whatever order

    def deliver(self, kind, node, content):
        content = recorddict_from_proto(recorddict_to_proto(content))
        message = Message(content, dst_node_id=node, message_type=kind)
        message.metadata.__dict__["_message_id"] = str(uuid4())
        with ThreadPoolExecutor(1) as node_process:  # nothing that watches this thread sees what it computes
            reply = node_process.submit(self.app, message, self.contexts[node]).result()
        reply.content = recorddict_from_proto(recorddict_to_proto(reply.content))
        return reply
