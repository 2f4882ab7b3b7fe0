"""Pods of a Kubernetes cluster: ``manifests`` says what they are, ``place`` submits and follows them."""
