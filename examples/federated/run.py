"""A SuperLink and two SuperNodes as processes of this machine; one node is killed for two rounds.

    python run.py FOLDER

Everything is written under FOLDER. It ends with the accuracy of every round and what each owner has spent.
Certificates and keys are made as README.md says for real networks.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def free_port():
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Deployment:
    """The processes, each in a group of its own, so that a kill takes its children along.

    `app` is the Flower app, `nodes` how many owners there are.
    """

    def __init__(self, folder, app=HERE, nodes=2):
        self.folder, self.app, self.nodes, self.link = Path(folder).resolve(), app, nodes, free_port()
        self.keys = self.folder / "keys"
        self.keys.mkdir(parents=True, exist_ok=True)
        tools = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        self.running, self.shown = {}, 0

    def start(self, name, *words):
        """Start a process; what it says goes to FOLDER/name.log."""
        log = (self.folder / f"{name}.log").open("a")
        self.running[name] = subprocess.Popen(
            words, stdout=log, stderr=log, env=self.environment, start_new_session=True
        )

    def do(self, *words):
        """Run a command to its end, in the folder of keys."""
        done = subprocess.run(words, cwd=self.keys, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}")

    def make_keys(self):
        """An authority, the server's certificate, and a key for each owner."""
        new = ("openssl", "req", "-newkey", "rsa:3072", "-nodes")
        self.do(
            *new, "-x509", "-days", "365", "-subj", "/CN=consortium", "-keyout", "ca.key", "-out", "ca.pem"
        )
        self.do(*new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
        (self.keys / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self.do(
            "openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "365", "-extfile", "names", "-out", "server.pem",
        )  # fmt: skip
        for number in range(self.nodes):
            self.do("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"owner-{number}.key")

    def start_link(self):
        """The server's side; it knows the owners' public keys."""
        if not (self.keys / "server.pem").exists():
            self.make_keys()
        self.start(
            "superlink", "flower-superlink", "--port", str(self.link),
            "--ssl-certfile", self.keys / "server.pem", "--ssl-keyfile", self.keys / "server.key",
            "--ssl-ca-certfile", self.keys / "ca.pem",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        config = Path(self.environment["FLWR_HOME"]) / "config.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "localhost:{self.link}"\n'
            f'root-certificates = "{self.keys}/ca.pem"\n'
        )
        while True:  # until it listens
            if self.running["superlink"].poll() is not None:
                raise RuntimeError(f"the SuperLink has ended; see {self.folder}/superlink.log")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.link)) == 0:
                    break
            time.sleep(0.2)
        for number in range(self.nodes):
            self.do("flwr", "supernode", "register", f"owner-{number}.key.pub")

    def start_node(self, number):
        """A data owner's side."""
        self.start(
            f"owner-{number}", "flower-supernode", "--superlink", f"localhost:{self.link}",
            "--root-certificates", self.keys / "ca.pem",
            "--auth-supernode-private-key", self.keys / f"owner-{number}.key", "--port", str(free_port()),
            "--node-config",
            f'partition-id={number} folder="{self.folder}" socket="{self.folder}/{number}.socket"',
        )  # fmt: skip

    def run(self, config=""):
        """Hand the app to the SuperLink; `config` sets what pyproject.toml does not say."""
        words = ["flwr", "run", str(self.app), "--run-config", f'folder="{self.folder}" {config}'.strip()]
        subprocess.run(words, env=self.environment, check=True, timeout=600)

    def kill(self, name):
        """SIGKILL, for the process and its children."""
        process = self.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def rounds(self):
        """The server's lines so far."""
        log = self.folder / "rounds.log"
        return log.read_text().splitlines() if log.exists() else []

    def wait_for(self, count, seconds=900):
        """Until so many rounds are over."""
        end = time.monotonic() + seconds
        while len(self.rounds()) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.rounds())} rounds after {seconds} s; see {self.folder}/*.log")
            time.sleep(0.2)
        for line in self.rounds()[self.shown :]:
            print(line, flush=True)
        self.shown = len(self.rounds())


def main(folder):
    """Six rounds; owner 1 is killed after the second and comes back after the fourth."""
    deployment = Deployment(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left running
    try:
        deployment.start_link()
        for number in range(2):
            deployment.start_node(number)
        deployment.run()
        deployment.wait_for(2)
        print("owner 1 is killed", flush=True)
        deployment.kill("owner-1")
        deployment.wait_for(4)
        print("owner 1 comes back", flush=True)
        deployment.start_node(1)
        deployment.wait_for(6)
    finally:
        for name in list(deployment.running):
            deployment.kill(name)
    for number in range(2):
        print(f"owner {number}: {spent(deployment.folder, number)}")


def spent(folder, number):
    """What an owner reads from its own folder, when its part is over: its key is deleted then."""
    from types import SimpleNamespace

    from hospitals.client import build

    where = {"partition-id": number, "folder": str(folder)}
    context = SimpleNamespace(node_config=where, run_config={"rounds": 6, "local-steps": 8})
    client = build(context)
    budget, statement = client.training.budget, client.finish()
    spent_of = f"epsilon {statement.epsilon:.3f} of {budget.epsilon:g}"
    return f"{spent_of} after {client.rounds_done} rounds, {statement.guarantee}"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/hospitals")
