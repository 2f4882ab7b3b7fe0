"""Kubernetes cluster: ``manifests`` describes the pods of a run, ``place`` submits and follows them."""
