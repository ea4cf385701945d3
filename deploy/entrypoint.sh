#!/bin/sh
# The image's entry point: a command of quire, or a model and options of `quire serve`. A container's server listens on
# all of its addresses, unless a later --host names another one.
case "$1" in
    serve)
        shift
        exec quire serve --host 0.0.0.0 "$@"
        ;;
    route | generate | chat | run-batch | pull | list | ls | show | rm | model | bench | plan | compile | doctor | top | completion | \
        --help | -h | --version)
        exec quire "$@"
        ;;
    *)
        exec quire serve --host 0.0.0.0 "$@"
        ;;
esac
