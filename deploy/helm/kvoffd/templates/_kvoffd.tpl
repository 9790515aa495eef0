{{- /* MiB of a size such as 1.5GiB, 64 Gi or 100GB: what the daemon's parser makes of it. */ -}}
{{- define "kvoffd.mib" }}
{{- $units := dict "k" 0.00095367431640625 "ki" 0.0009765625 "m" 0.95367431640625 "mi" 1.0 "g" 953.67431640625 }}
{{- $units = merge $units (dict "gi" 1024.0 "t" 953674.31640625 "ti" 1048576.0) }}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]+$" . | lower | trimSuffix "b")) }}
{{- end }}

{{- /* The memory that the daemon needs, in MiB: the sum of deploy/README.md, with which tests compare it. */ -}}
{{- define "kvoffd.memory" }}
{{- $stores := len .Values.shared.urls }}
{{- $places := false }}
{{- range .Values.peers.hosts }}
{{- if or (contains "/" .) (hasPrefix "dns+" .) }}{{ $places = true }}{{ else }}{{ $stores = add1 $stores }}{{ end }}
{{- end }}
{{- if $places }}{{ $stores = add $stores 8 }}{{ end }}
{{- $sum := addf (mulf 1.055 (include "kvoffd.mib" .Values.poolSize | float64)) 256 (mulf 143.5 $stores) }}
{{- range .Values.disks }}
{{- $sum = addf $sum 35 (maxf 16 (mulf 0.002 (include "kvoffd.mib" .size | float64))) }}
{{- end }}
{{- if .Values.disks }}{{ $sum = addf $sum 12.5 }}{{ end }}
{{- if include "kvoffd.peers" . }}{{ $sum = addf $sum 336 }}{{ end }}
{{- ceil $sum | int64 }}
{{- end }}

{{- /* Not empty if there are peers. */ -}}
{{- define "kvoffd.peers" }}{{ if or .Values.peers.listen .Values.peers.hosts }}yes{{ end }}{{ end }}

{{- define "kvoffd.image" }}
{{- $variant := ternary "-peers" "" (eq (include "kvoffd.peers" .) "yes") }}
{{- .Values.image.repository }}:{{ default (print .Chart.AppVersion $variant) .Values.image.tag }}
{{- end }}

{{- /* Puts the values into kvoffd's container and its pod, which is in a template: all are changed in place. */ -}}
{{- define "kvoffd.fill" }}
{{- $pod := .template.spec }}
{{- $kvoffd := .kvoffd }}
{{- $values := .root.Values }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "imagePullSecrets" }}
{{- $_ := unset $pod $name }}
{{- with get $values $name }}
{{- $_ := set $pod $name . }}
{{- end }}
{{- end }}
{{- $_ := set .template.metadata "labels" (merge .template.metadata.labels (default dict $values.podLabels)) }}
{{- $_ := set .template.metadata "annotations" (merge (deepCopy (default dict $values.podAnnotations)) .template.metadata.annotations) }}
{{- with $values.image.pullPolicy }}
{{- range concat (default list $pod.initContainers) $pod.containers }}
{{- if eq .image (include "kvoffd.image" $.root) }}
{{- $_ := set . "imagePullPolicy" $values.image.pullPolicy }}
{{- end }}
{{- end }}
{{- end }}
{{- $memory := printf "%sMi" (include "kvoffd.memory" .root) }}
{{- $_ := set $kvoffd.resources "requests" (dict "cpu" $values.cpu "memory" $memory) }}
{{- $_ := set $kvoffd.resources "limits" (dict "memory" $memory) }}
{{- $env := dict "KVOFFD_POOL_SIZE" $values.poolSize "KVOFFD_ALLOWED_UIDS" $values.allowedUids }}
{{- $volumes := list }}
{{- $mounts := list }}
{{- $disks := list }}
{{- range $number, $disk := $values.disks }}
{{- $disks = append $disks (printf "%s=%s" .path .size) }}
{{- $mounts = append $mounts (dict "name" (printf "kvoffd-disk-%d" $number) "mountPath" .path) }}
{{- $directory := dict "path" .path "type" "Directory" }}
{{- $volumes = append $volumes (dict "name" (printf "kvoffd-disk-%d" $number) "hostPath" $directory) }}
{{- end }}
{{- with $disks }}
{{- $_ := set $env "KVOFFD_DISK" (join "," .) }}
{{- end }}
{{- with $values.shared.urls }}
{{- $_ := set $env "KVOFFD_SHARED" (join "," .) }}
{{- end }}
{{- /* What fsGroup makes of a Secret's files, whatever the mode: root's own, to be read by the daemon's group (0440). */ -}}
{{- $secrets := dict }}
{{- with $values.shared.secret }}
{{- if not $values.shared.urls }}{{ fail "shared.secret is given without shared.urls: name the stores." }}{{ end }}
{{- $_ := set $secrets "shared" . }}
{{- $_ := set $env "KVOFFD_SHARED_PASSWORD_FILE" "/etc/kvoffd/shared/passwords" }}
{{- end }}
{{- if include "kvoffd.peers" .root }}
{{- $why := "peers need a secret: kubectl create secret generic kvoffd-peers --from-literal=secret=\"$(openssl rand -hex 32)\", and peers.secret=kvoffd-peers." }}
{{- $_ := set $secrets "peers" (required $why $values.peers.secret) }}
{{- $_ := set $env "KVOFFD_PEER_SECRET_FILE" "/etc/kvoffd/peers/secret" }}
{{- $_ := set $env "UCX_TCP_PORT_RANGE" $values.peers.dataPorts }}
{{- end }}
{{- range $name, $secret := $secrets }}
{{- $path := printf "/etc/kvoffd/%s" $name }}
{{- $mounts = append $mounts (dict "name" (printf "kvoffd-%s" $name) "mountPath" $path "readOnly" true) }}
{{- $file := dict "secretName" $secret "defaultMode" 288 }}
{{- $volumes = append $volumes (dict "name" (printf "kvoffd-%s" $name) "secret" $file) }}
{{- end }}
{{- with $values.peers.hosts }}
{{- $_ := set $env "KVOFFD_PEERS" (join "," .) }}
{{- end }}
{{- if $values.peers.listen }}
{{- $port := int $values.peers.port }}
{{- $_ := set $env "KVOFFD_PEER_LISTEN" (printf "*:%d" $port) }}
{{- $lent := dict "name" "peers" "containerPort" $port }}
{{- if not $values.sidecar.enabled }}
{{- $_ := set $lent "hostPort" $port }}
{{- end }}
{{- $_ := set $kvoffd "ports" (append $kvoffd.ports $lent) }}
{{- end }}
{{- with $mounts }}
{{- $_ := set $kvoffd "volumeMounts" (concat $kvoffd.volumeMounts .) }}
{{- $_ := set $pod "volumes" (concat $pod.volumes $volumes) }}
{{- end }}
{{- if $values.gpu }}
{{- $_ := set $pod "runtimeClassName" "nvidia" }}
{{- $_ := set $env "NVIDIA_VISIBLE_DEVICES" "all" }}
{{- $_ := set $env "NVIDIA_DRIVER_CAPABILITIES" "compute,utility" }}
{{- end }}
{{- $env = merge (deepCopy $values.env) $env }}
{{- range $kvoffd.env }}
{{- if hasKey $env .name }}
{{- $_ := set . "value" (get $env .name) }}
{{- $_ := unset $env .name }}
{{- end }}
{{- end }}
{{- range $name, $value := $env }}
{{- $_ := set $kvoffd "env" (append $kvoffd.env (dict "name" $name "value" $value)) }}
{{- end }}
{{- end }}
