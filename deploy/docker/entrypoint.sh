#!/usr/bin/env bash
# The image's program: duetime with these arguments; or an executor, where Spark starts a pod of this image. Spark names
# everything that an executor needs in its environment (BasicExecutorFeatureStep), and expects the image to start Java.
set -euo pipefail

if [ "${1:-}" != executor ]; then
    exec tini -- duetime "$@"
fi

spark=$(python -c 'import pyspark; print(pyspark.__path__[0])')
options=()
# SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ...
while IFS= read -r name; do
    options+=("${!name}")
done < <(compgen -e SPARK_JAVA_OPT_ | sort -t_ -k4 -n)

exec tini -s -- java "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_EXTRA_CLASSPATH:-}:$spark/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
