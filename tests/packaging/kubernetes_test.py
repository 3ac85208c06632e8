"""The Kubernetes manifest: its form, that its parts fit together, and that the launcher takes its command. No cluster is asked."""

import os
import re
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import BIN, SOURCE, environment, main, run  # noqa: E402

try:
    import yaml
except ImportError:
    yaml = None

MANIFEST = os.path.join(SOURCE, "packaging", "kubernetes", "train.yaml")
# The fields that Kubernetes has at these places, as far as a manifest like this may need them; a list has the form of its one element.
NAMES = {"name": str, "namespace": str, "labels": dict, "annotations": dict}
CONTAINER = {"name": str, "image": str, "command": [str], "args": [str], "workingDir": str,
             "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}, "secretKeyRef": {"name": str, "key": str}}}],
             "ports": [{"name": str, "containerPort": int}], "resources": {"limits": dict, "requests": dict},
             "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool, "subPath": str}]}
POD = {"subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER], "initContainers": [CONTAINER],
       "volumes": [{"name": str, "secret": {"secretName": str, "defaultMode": int}, "emptyDir": dict}],
       "securityContext": {"runAsUser": int, "runAsGroup": int, "fsGroup": int}}
FORMS = {"Service": {"apiVersion": str, "kind": str, "metadata": NAMES,
                     "spec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": dict, "ports": [{"name": str, "port": int}]}},
         "Job": {"apiVersion": str, "kind": str, "metadata": NAMES,
                 "spec": {"completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
                          "template": {"metadata": NAMES, "spec": POD}}}}


def wrong_form(value, form, place):
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return [f"{place} is no mapping"]
        return [text for key, one in value.items()
                for text in (wrong_form(one, form[key], f"{place}.{key}") if key in form else [f"{place} has no field {key}"])]
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{place} is no list"]
        return [text for number, one in enumerate(value) for text in wrong_form(one, form[0], f"{place}[{number}]")]
    return [] if type(value) is form else [f"{place} is {value!r}, not of type {form.__name__}"]


@unittest.skipIf(yaml is None, "no PyYAML: apt-get install python3-yaml")
class Manifest(unittest.TestCase):
    def setUp(self):
        with open(MANIFEST, encoding="utf-8") as file:
            self.text = file.read()
        self.service, self.job = yaml.safe_load_all(self.text)
        self.spec = self.job["spec"]
        self.pod = self.spec["template"]["spec"]
        self.container, = self.pod["containers"]

    def test_its_form(self):
        for thing, api in ((self.service, "v1"), (self.job, "batch/v1")):
            self.assertEqual(thing["apiVersion"], api)
            self.assertEqual(wrong_form(thing, FORMS[thing["kind"]], thing["kind"]), [])
        self.assertEqual(wrong_form({**self.job, "spce": {}}, FORMS["Job"], "Job"), ["Job has no field spce"])

    def test_its_parts_fit_together(self):
        self.assertEqual((self.service["spec"]["clusterIP"], self.spec["completionMode"]), ("None", "Indexed"))
        self.assertEqual(self.service["metadata"]["name"], self.pod["subdomain"])
        self.assertEqual(self.service["spec"]["selector"], self.spec["template"]["metadata"]["labels"])
        self.assertEqual(self.spec["completions"], self.spec["parallelism"])
        command = self.container["command"][2]
        self.assertIn(f"--nnodes {self.spec['completions']} ", command)
        self.assertIn(f" -n {self.container['resources']['limits']['cpu']} ", command)
        place, port = re.search(r'--rendezvous "([\w.$-]+):(\d+)"', command).groups()
        self.assertEqual(place, f"{self.job['metadata']['name']}-0.{self.pod['subdomain']}.$NAMESPACE.svc.cluster.local")
        self.assertEqual(int(port), self.service["spec"]["ports"][0]["port"])
        self.assertEqual(self.container["env"], [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}])

    def test_the_key_is_a_secret_that_only_its_owner_reads(self):
        volume, = self.pod["volumes"]
        mount, = self.container["volumeMounts"]
        self.assertEqual((volume["name"], volume["secret"]["defaultMode"]), (mount["name"], 0o400))
        secret, key = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", self.text).groups()
        self.assertEqual(volume["secret"]["secretName"], secret)
        self.assertIn(f"--key-file {mount['mountPath']}/{key} ", self.container["command"][2])

    def test_the_launcher_takes_the_command(self):
        shell, flag, command = self.container["command"]
        with tempfile.TemporaryDirectory(prefix="lockstep_test_") as folder:
            for index, expected in (("0", "node 0: ranks 0 to 3\n  listens     train-0.train.science.svc.cluster.local:29400\nnode 1: "),
                                    ("1", "node 1 of 2: 4 ranks\n  joins       train-0.train.science.svc.cluster.local:29400\n")):
                said = run(shell, flag, command.replace("lockstep run", "lockstep run --dry-run"), cwd=folder,
                           env=environment(PATH=BIN + ":" + os.environ["PATH"], JOB_COMPLETION_INDEX=index, NAMESPACE="science"))
                self.assertTrue(said.stdout.startswith(expected), said.stdout)
                self.assertTrue(said.stdout.endswith("  command     ./train\n"), said.stdout)

    def test_the_guide_leads_to_it(self):
        with open(os.path.join(SOURCE, "docs", "several_machines.md"), encoding="utf-8") as file:
            self.assertIn("(../packaging/kubernetes/train.yaml)", file.read())


if __name__ == "__main__":
    main()
