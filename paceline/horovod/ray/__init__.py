"""Horovod on Ray: functions on the nodes of the cluster to which this process is connected."""

from paceline.horovod.ray.elastic import ElasticRayExecutor
from paceline.horovod.ray.runner import RayExecutor
from paceline.horovod.ray.worker import BaseHorovodWorker
